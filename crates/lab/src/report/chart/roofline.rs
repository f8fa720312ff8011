//! Operations per second over operations per byte, under what the machine can do.

use super::{super::document::Document, Canvas, Chart, Scale, short};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 48.0;

struct Point {
    key: String,
    label: String,
    /// FLOP per byte.
    intensity: f64,
    gflops: f64,
    /// Profiled points use the bytes that were moved, timed ones the bytes that had to.
    profiled: bool,
}

struct Roof {
    name: String,
    gflops: f64,
    gbps: f64,
}

/// Timed rows and profiled launches; roofs where a run measured its machine or a profile says.
pub(crate) fn chart(document: &Document) -> Option<Chart> {
    let points = points(document);
    if points.is_empty() {
        return None;
    }
    let roofs = roofs(document);
    let intensities = points.iter().map(|p| p.intensity).chain(roofs.iter().map(|r| r.gflops / r.gbps));
    let x = Scale::log(intensities.flat_map(|i| [i / 2.0, i * 2.0]), [LEFT, WIDTH - RIGHT]);
    let rates = points.iter().map(|p| p.gflops).chain(roofs.iter().map(|r| r.gflops));
    let y = Scale::log(rates.flat_map(|r| [r / 1.5, r * 1.3]), [HEIGHT - BOTTOM, TOP]);
    let mut canvas = Canvas::new("roofline", WIDTH, HEIGHT);
    let most = points.iter().map(|p| p.gflops).chain(roofs.iter().map(|r| r.gflops)).fold(0.0, f64::max);
    axes(&mut canvas, &x, &y, if most >= 1e3 { ("TFLOP/s", 1e3) } else { ("GFLOP/s", 1.0) });
    for roof in &roofs {
        // The memory's slope up to the ridge, then flat to the edge.
        let ridge = [x.place(roof.gflops / roof.gbps), y.place(roof.gflops)];
        canvas.line(slope_start(&x, &y, roof), ridge, "roof");
        canvas.line(ridge, [WIDTH - RIGHT, ridge[1]], "roof");
        canvas.text(WIDTH - RIGHT - 4.0, y.place(roof.gflops) - 6.0, "tick end", &roof.name);
    }
    let places: Vec<[f64; 2]> = points.iter().map(|p| [x.place(p.intensity), y.place(p.gflops)]).collect();
    let mut labels: Vec<LabelBox> = Vec::new();
    for (point, &[px, py]) in points.iter().zip(&places) {
        let class = if point.profiled { "profiled" } else { "ours" };
        let tip = format!(
            "{}: {} GFLOP/s at {} FLOP/byte ({})",
            point.label,
            short(point.gflops),
            short(point.intensity),
            if point.profiled { "bytes moved, under the profiler" } else { "bytes that must move" }
        );
        let shape = format_args!(r#"circle cx="{px:.1}" cy="{py:.1}" r="5""#);
        canvas.mark(point.key.clone(), point.gflops, shape, class, &tip);
        // A label only where it runs into nothing; the others are in the tooltip.
        let right = LabelBox::of_text(px + 9.0, py, &point.label);
        let left = LabelBox { x: px - 9.0 - right.width, ..right };
        let free = |label: &LabelBox| {
            label.x >= LEFT
                && label.x + label.width <= WIDTH - RIGHT
                && labels.iter().all(|known| !known.meets(label))
                && places.iter().all(|place| !label.holds(*place))
        };
        if let Some(label) = [right, left].into_iter().find(free) {
            canvas.text(label.x, py + 4.0, "tick", &point.label);
            labels.push(label);
        }
    }
    Some(canvas.finish("Roofline"))
}

/// Where a label lies; text is about seven units a character and twelve high.
#[derive(Clone, Copy)]
struct LabelBox {
    x: f64,
    y: f64,
    width: f64,
}

impl LabelBox {
    fn of_text(x: f64, y: f64, text: &str) -> Self {
        Self { x, y, width: 7.0 * text.chars().count() as f64 }
    }

    fn meets(&self, other: &Self) -> bool {
        (self.y - other.y).abs() < 13.0 && self.x < other.x + other.width && other.x < self.x + self.width
    }

    fn holds(&self, [x, y]: [f64; 2]) -> bool {
        (self.y - y).abs() < 10.0 && x > self.x - 6.0 && x < self.x + self.width + 6.0
    }
}

/// Where a roof's slope enters the picture: at its left edge, or at its bottom.
fn slope_start(x: &Scale, y: &Scale, roof: &Roof) -> [f64; 2] {
    // Walk down the slope until it leaves the picture.
    let mut intensity = roof.gflops / roof.gbps;
    let (mut px, mut py) = (x.place(intensity), y.place(roof.gflops));
    loop {
        let next = intensity / 1.05;
        let (nx, ny) = (x.place(next), y.place(next * roof.gbps));
        if nx >= px || ny <= py || nx <= LEFT || ny >= HEIGHT - BOTTOM {
            return [px, py];
        }
        (intensity, px, py) = (next, nx, ny);
    }
}

fn axes(canvas: &mut Canvas, x: &Scale, y: &Scale, (unit, per): (&str, f64)) {
    for tick in x.ticks(6) {
        let px = x.place(tick);
        canvas.line([px, TOP], [px, HEIGHT - BOTTOM], "grid");
        canvas.text(px, HEIGHT - BOTTOM + 16.0, "tick middle", &short(tick));
    }
    for tick in y.ticks(5) {
        let py = y.place(tick);
        canvas.line([LEFT, py], [WIDTH - RIGHT, py], "grid");
        canvas.text(LEFT - 6.0, py + 4.0, "tick end", &short(tick / per));
    }
    canvas.text((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0, "axis middle", "FLOP per byte");
    canvas.text(4.0, TOP - 2.0, "axis", unit);
}

fn points(document: &Document) -> Vec<Point> {
    let timed = document.rows.iter().filter(|row| !row.baseline).filter_map(|row| {
        let (gflops, gbps) = (row.gflops?, row.gbps.filter(|gbps| *gbps > 0.0)?);
        let label = format!("{} {}", row.kernel, row.problem);
        let key = format!("{}|{}", row.kernel, row.problem);
        Some(Point { key, label, intensity: gflops / gbps, gflops, profiled: false })
    });
    let profiled = document.profiles.iter().filter_map(|profile| {
        let roof = profile.roofline.as_ref()?;
        let problem = profile.problem.as_deref().unwrap_or_default();
        let key = format!("{}|{problem}|profile", profile.kernel);
        let label = format!("{} {problem}", profile.kernel);
        Some(Point {
            key,
            label,
            intensity: roof.intensity,
            gflops: roof.achieved_tflops * 1e3,
            profiled: true,
        })
    });
    timed.chain(profiled).filter(|point| point.gflops > 0.0 && point.intensity > 0.0).collect()
}

/// The machine's roofs: measured at the start of a run on a CPU, by a profile on a GPU.
fn roofs(document: &Document) -> Vec<Roof> {
    let mut roofs: Vec<Roof> = Vec::new();
    let environments = document.sources.iter().filter_map(|source| source.environment.as_ref());
    for environment in environments {
        if let (Some(gflops), Some(gbps)) = (environment.fma_peak_gflops, environment.memory_gbps) {
            let name = format!("{} GFLOP/s fused multiply-add, {} GB/s", short(gflops), short(gbps));
            roofs.push(Roof { name, gflops, gbps });
        }
    }
    let profiled = document.profiles.iter().filter_map(|profile| profile.roofline.as_ref());
    let best = profiled.max_by(|a, b| a.tensor_peak_tflops.total_cmp(&b.tensor_peak_tflops));
    if let Some((roof, gbps)) = best.and_then(|roof| Some((roof, roof.dram_peak_gbps?))) {
        let name = format!("{} TFLOP/s tensor cores, {} GB/s", short(roof.tensor_peak_tflops), short(gbps));
        roofs.push(Roof { name, gflops: roof.tensor_peak_tflops * 1e3, gbps });
    }
    roofs.truncate(2);
    roofs
}
