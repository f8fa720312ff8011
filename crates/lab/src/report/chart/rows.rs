//! The layout most charts share: groups of labelled rows over one axis.

use super::{Canvas, Scale, short};

pub(super) const WIDTH: f64 = 900.0;
const LABELS: f64 = 200.0;
/// Room for a number at the end of a row.
const NUMBERS: f64 = 74.0;
const ROW: f64 = 20.0;
const GROUP: f64 = 30.0;
const TOP: f64 = 22.0;
const AXIS: f64 = 36.0;

/// Rows under headings.
pub(super) struct Rows {
    pub(super) canvas: Canvas,
    scale: Scale,
    y: f64,
    bottom: f64,
}

/// From where to where numbers are laid.
pub(super) const SPAN: [f64; 2] = [LABELS, WIDTH - NUMBERS];

impl Rows {
    /// A chart for groups with so many rows each.
    pub(super) fn new(id: &str, groups: &[usize], scale: Scale, axis: &str) -> Self {
        let rows: usize = groups.iter().sum();
        let bottom = TOP + groups.len() as f64 * GROUP + rows as f64 * ROW;
        let mut canvas = Canvas::new(id, WIDTH, bottom + AXIS);
        for tick in scale.ticks(6) {
            let x = scale.place(tick);
            canvas.line([x, TOP], [x, bottom], "grid");
            // Above and below: a long chart is seldom seen whole.
            canvas.text(x, TOP - 8.0, "tick middle", &short(tick));
            canvas.text(x, bottom + 15.0, "tick middle", &short(tick));
        }
        canvas.text((SPAN[0] + SPAN[1]) / 2.0, bottom + 31.0, "axis middle", axis);
        Self { canvas, scale, y: TOP, bottom }
    }

    /// A vertical line at a number, all the way down.
    pub(super) fn reference(&mut self, value: f64) {
        let x = self.scale.place(value);
        self.canvas.line([x, TOP], [x, self.bottom], "reference");
    }

    /// A heading.
    pub(super) fn group(&mut self, name: &str) {
        self.canvas.text(4.0, self.y + 21.0, "group", name);
        self.y += GROUP;
    }

    /// A row with its label and the number at its end; gives its middle.
    pub(super) fn row(&mut self, label: &str, baseline: bool, number: &str) -> f64 {
        let middle = self.y + ROW / 2.0;
        let class = if baseline { "label end baseline" } else { "label end" };
        self.canvas.text(LABELS - 10.0, middle + 4.0, class, &shortened(label));
        self.canvas.text(WIDTH - 4.0, middle + 4.0, "number end", number);
        self.y += ROW;
        middle
    }

    pub(super) fn place(&self, value: f64) -> f64 {
        self.scale.place(value)
    }
}

/// A label that fits its column.
fn shortened(label: &str) -> String {
    const MOST: usize = 27;
    if label.chars().count() <= MOST {
        return label.to_owned();
    }
    label.chars().take(MOST - 1).chain(['…']).collect()
}
