//! Plots: horizontal bars in SVG, readable on a light and on a dark page.

use svg::Document;
use svg::node::element::{Rectangle, Style, Text};

use crate::report::thousands;

pub struct Bar {
    pub label: String,
    pub value: f64,
    pub color: Color,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Color {
    Idem,
    Other,
    /// What no contender can be better than.
    Floor,
}

const STYLE: &str = "text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .end { text-anchor: end }
.idem { fill: #1f883d } .other { fill: #8c959f } .floor { fill: #54aeff }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .other { fill: #6e7681 } .floor { fill: #388bfd } }";

const WIDTH: f64 = 720.0;
const LABELS: f64 = 270.0;
const NUMBERS: f64 = 80.0;
const STEP: f64 = 24.0;
const TOP: f64 = 40.0;

/// One bar a contender, the longest as long as there is room.
pub fn bars(title: &str, bars: &[Bar]) -> String {
    let longest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + STEP * bars.len() as f64 + 8.0;
    let mut document = Document::new()
        .set("viewBox", (0.0, 0.0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("role", "img")
        .add(Style::new(STYLE))
        .add(text(title, 8.0, 22.0, "title"));
    for (i, bar) in bars.iter().enumerate() {
        let top = TOP + STEP * i as f64;
        let length = (bar.value / longest).max(0.0) * (WIDTH - LABELS - NUMBERS);
        let class = match bar.color {
            Color::Idem => "idem",
            Color::Other => "other",
            Color::Floor => "floor",
        };
        document = document
            .add(text(&bar.label, LABELS - 8.0, top + 14.0, "end"))
            .add(
                Rectangle::new()
                    .set("class", class)
                    .set("x", LABELS)
                    .set("y", top)
                    .set("width", format!("{length:.1}"))
                    .set("height", STEP - 6.0)
                    .set("rx", 2),
            )
            .add(text(&thousands(bar.value), LABELS + length + 6.0, top + 14.0, "number"));
    }
    document.to_string()
}

fn text(content: &str, x: f64, y: f64, class: &str) -> Text {
    Text::new(content).set("x", format!("{x:.1}")).set("y", y).set("class", class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values_and_texts_are_escaped() {
        let bar = |label: &str, value| Bar { label: label.to_string(), value, color: Color::Other };
        let svg = bars("a & b", &[bar("half", 500.0), bar("all", 1000.0), bar("none", 0.0)]);
        let room = WIDTH - LABELS - NUMBERS;
        for width in [room / 2.0, room, 0.0] {
            assert!(svg.contains(&format!("width=\"{width:.1}\"")), "{svg}");
        }
        assert!(svg.contains("a &amp; b") && svg.contains("1,000"), "{svg}");
    }
}
