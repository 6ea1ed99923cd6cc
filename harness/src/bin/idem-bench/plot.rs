//! Plots: horizontal bars, and lines over time, in SVG, readable on a light and on a dark page.

use svg::Document;
use svg::node::element::{Polyline, Rectangle, Style, Text};

use crate::report::thousands;

pub struct Bar {
    pub label: String,
    pub value: f64,
    pub color: Color,
}

pub struct Line {
    pub label: String,
    /// From left to right, none below 0.
    pub points: Vec<(f64, f64)>,
    pub color: Color,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Color {
    Idem,
    Other,
    /// What no contender can be better than.
    Floor,
}

impl Color {
    fn class(self) -> &'static str {
        match self {
            Color::Idem => "idem",
            Color::Other => "other",
            Color::Floor => "floor",
        }
    }
}

const STYLE: &str = "text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .end { text-anchor: end }
.idem { fill: #1f883d } .other { fill: #8c959f } .floor { fill: #54aeff }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .other { fill: #6e7681 } .floor { fill: #388bfd } }
polyline { stroke-width: 2 } polyline.idem { fill: none; stroke: #1f883d } polyline.other { fill: none; stroke: #8c959f } polyline.floor { fill: none; stroke: #54aeff }";

const WIDTH: f64 = 720.0;
const LABELS: f64 = 270.0;
const NUMBERS: f64 = 80.0;
const STEP: f64 = 24.0;
const TOP: f64 = 40.0;

/// One bar a contender, the longest as long as there is room.
pub fn bars(title: &str, bars: &[Bar]) -> String {
    let longest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + STEP * bars.len() as f64 + 8.0;
    let mut document = titled(title, height);
    for (i, bar) in bars.iter().enumerate() {
        let top = TOP + STEP * i as f64;
        let length = (bar.value / longest).max(0.0) * (WIDTH - LABELS - NUMBERS);
        document = document
            .add(text(&bar.label, LABELS - 8.0, top + 14.0, "end"))
            .add(
                Rectangle::new()
                    .set("class", bar.color.class())
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

/// Lines from 0 upwards, each with a key that says where it ends.
pub fn lines(title: &str, lines: &[Line]) -> String {
    const HEIGHT: f64 = 200.0;
    const RIGHT: f64 = 230.0;
    const LEFT: f64 = 60.0;
    let points = || lines.iter().flat_map(|line| &line.points);
    let end = points().map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
    let highest = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
    let bottom = TOP + HEIGHT;
    let mut document = titled(title, bottom + STEP)
        .add(text(&thousands(highest), LEFT - 8.0, TOP + 10.0, "end"))
        .add(text("0", LEFT - 8.0, bottom, "end"))
        .add(text(&thousands(end), WIDTH - RIGHT, bottom + 16.0, "end"));
    for (i, line) in lines.iter().enumerate() {
        let place = |(x, y): &(f64, f64)| {
            let x = LEFT + x / end * (WIDTH - LEFT - RIGHT);
            format!("{x:.1},{:.1}", bottom - y / highest * HEIGHT)
        };
        let places: Vec<String> = line.points.iter().map(place).collect();
        let last = line.points.last().map_or(0.0, |point| point.1);
        let (left, top) = (WIDTH - RIGHT + 16.0, TOP + STEP * i as f64);
        document = document
            .add(Polyline::new().set("class", line.color.class()).set("points", places.join(" ")))
            .add(
                Rectangle::new()
                    .set("class", line.color.class())
                    .set("x", left)
                    .set("y", top)
                    .set("width", 12)
                    .set("height", 12),
            )
            .add(text(
                &format!("{}: {}", line.label, thousands(last)),
                left + 20.0,
                top + 11.0,
                "key",
            ));
    }
    document.to_string()
}

fn titled(title: &str, height: f64) -> Document {
    Document::new()
        .set("viewBox", (0.0, 0.0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .set("role", "img")
        .add(Style::new(STYLE))
        .add(text(title, 8.0, 22.0, "title"))
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

    #[test]
    fn lines_reach_from_corner_to_corner() {
        let line = |label: &str, points: &[(f64, f64)]| Line {
            label: label.to_string(),
            points: points.to_vec(),
            color: Color::Idem,
        };
        let svg = lines("a", &[line("b", &[(0.0, 0.0), (5.0, 50.0)]), line("c", &[(10.0, 25.0)])]);
        assert!(svg.contains("points=\"60.0,240.0 275.0,40.0\""), "{svg}");
        assert!(svg.contains("points=\"490.0,140.0\"") && svg.contains("c: 25"), "{svg}");
    }
}
