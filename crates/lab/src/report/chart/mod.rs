//! Charts as SVG, one per file. Colours are the page's (CSS), so that light, dark and print work; every mark carries the
//! number it stands for, so that a test can hold the picture against the record.

pub(super) mod best;
pub(super) mod latency;
pub(super) mod lineage;
pub(super) mod rate;
pub(super) mod roofline;
mod rows;
mod scale;
pub(super) mod speedup;

pub(super) use scale::Scale;

use std::fmt::Write;

/// A finished chart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chart {
    /// Its element's id.
    pub(super) id: String,
    /// The `<svg>` element.
    pub(super) svg: String,
    /// What its marks stand for.
    pub(super) marks: Vec<Mark>,
}

/// A mark's key within its chart, and its number.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(super) struct Mark {
    pub(super) key: String,
    pub(super) value: f64,
}

/// A chart being drawn.
pub(super) struct Canvas {
    id: String,
    width: f64,
    height: f64,
    body: String,
    marks: Vec<Mark>,
}

impl Canvas {
    pub(super) fn new(id: &str, width: f64, height: f64) -> Self {
        Self { id: id.to_owned(), width, height, body: String::new(), marks: Vec::new() }
    }

    /// Raw SVG. Writing to a string cannot fail.
    pub(super) fn push(&mut self, markup: std::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(markup);
    }

    pub(super) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.push(format_args!(r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escape(text)));
    }

    pub(super) fn line(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], class: &str) {
        self.push(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        ));
    }

    /// A mark: a shape with its key, its number and a tooltip. `shape` is an element's name with its geometry.
    pub(super) fn mark(
        &mut self,
        key: String,
        value: f64,
        shape: std::fmt::Arguments<'_>,
        class: &str,
        tip: &str,
    ) {
        let name = shape.to_string();
        let element = name.split(' ').next().unwrap_or("circle").to_owned();
        let (key_text, tip) = (escape(&key), escape(tip));
        self.push(format_args!(
            r#"<{name} class="mark {class}" data-key="{key_text}" data-value="{value}"><title>{tip}</title></{element}>"#
        ));
        self.marks.push(Mark { key, value });
    }

    pub(super) fn finish(self, title: &str) -> Chart {
        let Self { id, width, height, body, marks } = self;
        let title = escape(title);
        let svg = format!(
            "<svg id=\"{id}\" class=\"chart\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{title}\" \
             style=\"--w:{width:.0}px\" xmlns=\"http://www.w3.org/2000/svg\">{body}</svg>"
        );
        Chart { id, svg, marks }
    }
}

/// Text between tags or in an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

/// A number with three digits that count.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        x if !(1e-3..1e5).contains(&x) => format!("{value:.1e}"),
        x if x >= 100.0 => format!("{value:.0}"),
        x if x >= 10.0 => format!("{value:.1}"),
        x if x >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A time in the unit that suits it.
pub(super) fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", short(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", short(us / 1e3)),
        us => format!("{} µs", short(us)),
    }
}
