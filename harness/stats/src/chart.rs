//! Axes, curves and legends of SVG plots. The page that contains a plot sets its colours with classes and CSS
//! variables. [`standalone`] makes a separate file of a plot.

use maud::{Markup, html};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;
/// Approximate maximum number of points of one curve. More points would not be visible.
const POINTS: usize = 400;
/// Colours of a standalone plot.
const STYLE: &str = "svg{background:#fff;font:12px system-ui,sans-serif}.grid{stroke:#dcdfe3}.tick,.label{fill:#656d76}\
    .curve{fill:none;stroke-width:2}.limit{stroke:#cf222e;stroke-dasharray:5 4}";

/// A drawing with two linear axes that start at zero.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    height: f64,
    x_max: f64,
    y_max: f64,
}

impl Frame {
    /// Axes from zero to the given maxima. A maximum that is not positive is replaced by 1 to avoid a division by zero.
    #[must_use]
    pub fn new(height: f64, x_max: f64, y_max: f64) -> Self {
        let some = |max: f64| if max > 0.0 { max } else { 1.0 };
        Self {
            height,
            x_max: some(x_max),
            y_max: some(y_max),
        }
    }

    /// Horizontal coordinate of a value.
    #[must_use]
    pub fn x(&self, value: f64) -> f64 {
        LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)
    }

    /// Vertical coordinate of the upper end of the vertical axis.
    #[must_use]
    pub fn top(&self) -> f64 {
        TOP
    }

    /// Vertical coordinate of a value.
    #[must_use]
    pub fn y(&self, value: f64) -> f64 {
        let inner = self.height - TOP - BOTTOM;
        TOP + inner - value / self.y_max * inner
    }

    /// The axes with `content` drawn on top. The labels contain the quantities of the axes and their units; an empty
    /// `y_label` omits the vertical axis.
    #[must_use]
    pub fn svg(&self, title: &str, x_label: &str, y_label: &str, content: &Markup) -> Markup {
        html! {
            svg viewBox={ "0 0 " (WIDTH) " " (self.height) } role="img" aria-label=(title) {
                (self.x_axis(x_label))
                (self.y_axis(y_label))
                (content)
            }
        }
    }

    /// The path of a step function: the share of `n` samples, in percent, up to each of `sorted`. The curve ends below
    /// 100 % if `sorted` has fewer than `n` values.
    #[must_use]
    pub fn distribution(&self, sorted: &[f64], n: usize) -> String {
        let every = sorted.len().div_ceil(POINTS).max(1);
        let mut d = format!("M{} {}", place(self.x(0.0)), place(self.y(0.0)));
        for (index, value) in sorted.iter().enumerate() {
            if index % every == 0 || index + 1 == sorted.len() {
                let share = (index + 1) as f64 / n as f64 * 100.0;
                d.push_str(&format!(
                    "H{}V{}",
                    place(self.x(*value)),
                    place(self.y(share))
                ));
            }
        }
        d
    }

    fn x_axis(&self, label: &str) -> Markup {
        let (top, bottom) = (TOP, self.height - BOTTOM);
        html! {
            @for tick in ticks(self.x_max) {
                @let x = place(self.x(tick));
                line class="grid" x1=(x) x2=(x) y1=(top) y2=(bottom) {}
                text class="tick" x=(x) y=(bottom + 16.0) text-anchor="middle" { (short(tick)) }
            }
            text class="label" x=(WIDTH - RIGHT) y=(self.height - 6.0) text-anchor="end" { (label) }
        }
    }

    fn y_axis(&self, label: &str) -> Markup {
        html! {
            @if !label.is_empty() {
                @for tick in ticks(self.y_max) {
                    @let y = place(self.y(tick));
                    line class="grid" x1=(LEFT) x2=(WIDTH - RIGHT) y1=(y) y2=(y) {}
                    text class="tick" x=(LEFT - 6.0) y=(y) dy="4" text-anchor="end" { (short(tick)) }
                }
                text class="label" x="2" y=(self.height - 6.0) { (label) }
            }
        }
    }
}

/// Formats a coordinate with one decimal: a tenth of a pixel is sufficient and keeps files small.
#[must_use]
pub fn place(coordinate: f64) -> String {
    format!("{coordinate:.1}")
}

/// At most eleven multiples of a round number, from zero to `max`.
fn ticks(max: f64) -> Vec<f64> {
    let power = 10_f64.powf((max / 10.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .map(|f| f * power)
        .into_iter()
        .find(|step| max / step <= 10.0)
        .unwrap_or(max);
    (0..=10)
        .map(|i| f64::from(i) * step)
        .take_while(|tick| *tick <= max * 1.000_001)
        .collect()
}

/// Formats a number with up to three decimals and without trailing zeros.
fn short(x: f64) -> String {
    let text = format!("{x:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// An SVG file of a plot that [`Frame::svg`] drew.
#[must_use]
pub fn standalone(plot: &Markup) -> String {
    let start = format!("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\"");
    let drawn = plot.0.replacen("<svg", &start, 1);
    drawn.replacen('>', &format!("><style>{STYLE}</style>"), 1)
}

/// A legend of names and colours.
#[must_use]
pub fn legend(entries: &[(String, String)]) -> Markup {
    html! {
        p.legend {
            @for (name, colour) in entries {
                span { i style={ "background:" (colour) } {} (name) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(
            ticks(100.0),
            (0..=10).map(|i| f64::from(i) * 10.0).collect::<Vec<_>>()
        );
        assert_eq!(ticks(7.3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        for max in [0.001, 0.3, 1.0, 42.0, 999.0, 123_456.0] {
            let n = ticks(max).len();
            assert!((4..=11).contains(&n), "{max}: {n}");
        }
        assert_eq!(short(2.0), "2");
        assert_eq!(short(0.25), "0.25");
    }
}
