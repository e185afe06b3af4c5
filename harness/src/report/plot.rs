//! Inline SVG plots. Colours are CSS variables, so that the same drawing works in light and dark mode.

pub(super) mod cdf;
pub(super) mod ladder;
pub(super) mod memory;
pub(super) mod timeline;

use maud::{Markup, html};
use model::StartPhase;

use crate::event::Attempt;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// A drawing with two linear axes that start at zero.
struct Frame {
    height: f64,
    x_max: f64,
    y_max: f64,
}

impl Frame {
    /// Axes from zero to the given maxima. A maximum that is not positive is replaced by 1 to avoid a division by zero.
    fn new(height: f64, x_max: f64, y_max: f64) -> Self {
        let some = |max: f64| if max > 0.0 { max } else { 1.0 };
        Self {
            height,
            x_max: some(x_max),
            y_max: some(y_max),
        }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let inner = self.height - TOP - BOTTOM;
        TOP + inner - value / self.y_max * inner
    }

    /// The axes with `content` drawn on top. The labels contain the quantities of the axes and their units; an empty
    /// `y_label` omits the vertical axis.
    fn svg(&self, title: &str, x_label: &str, y_label: &str, content: &Markup) -> Markup {
        html! {
            svg viewBox={ "0 0 " (WIDTH) " " (self.height) } role="img" aria-label=(title) {
                (self.x_axis(x_label))
                (self.y_axis(y_label))
                (content)
            }
        }
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
fn place(coordinate: f64) -> String {
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

/// A legend of names and colours.
fn legend(entries: &[(String, String)]) -> Markup {
    html! {
        p.legend {
            @for (name, colour) in entries {
                span { i style={ "background:" (colour) } {} (name) }
            }
        }
    }
}

/// A step of a start: the time between two consecutive stamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Phase at the end of the step; `None` for the wait between intended and actual start.
    until: Option<StartPhase>,
    ns: u64,
}

impl Step {
    fn name(self) -> &'static str {
        self.until.map_or("waiting to start", StartPhase::name)
    }

    fn colour(self) -> String {
        match self.until {
            None => "var(--wait)".to_owned(),
            Some(phase) => phase_colour(phase),
        }
    }
}

fn phase_colour(phase: StartPhase) -> String {
    let index = StartPhase::ALL.iter().position(|p| *p == phase);
    format!("var(--p{})", index.unwrap_or(0))
}

/// The steps of a start in chronological order, from the intended start to the last stamp.
fn steps(attempt: &Attempt) -> Vec<Step> {
    let mut stamps: Vec<(Option<StartPhase>, u64)> = attempt
        .timeline
        .iter()
        .map(|(phase, at)| (Some(phase), at))
        .collect();
    stamps.push((None, attempt.actual_ns));
    stamps.sort_by_key(|(phase, at)| (*at, *phase));
    let mut from = attempt.intended_ns;
    stamps
        .into_iter()
        .map(|(until, at)| {
            let ns = at.saturating_sub(from);
            from = from.max(at);
            Step { until, ns }
        })
        .collect()
}

/// A legend of the steps that occur in these starts, in the order of the phases.
fn step_legend<'a>(attempts: impl IntoIterator<Item = &'a Attempt>) -> Markup {
    let mut kinds: Vec<Step> = attempts.into_iter().flat_map(steps).collect();
    kinds.sort_by_key(|step| step.until);
    kinds.dedup_by_key(|step| step.until);
    let entries: Vec<(String, String)> = kinds
        .into_iter()
        .map(|step| (step.name().to_owned(), step.colour()))
        .collect();
    legend(&entries)
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
