//! Latency over the number of living sandboxes, or over the time since the first start.

use maud::{Markup, html};
use stats::chart::{Frame, legend, place};

use crate::{
    report::View,
    scenario::{Arrival, HoldUntil, Limit, Metric},
    summary::density,
};
use model::StartPhase;
use stats::quantile::INFINITE;

/// Maximum number of circles in a plot. With more starts, only the slowest of each group is drawn, so no slow start
/// is hidden.
const CIRCLES: usize = 1200;

/// A start: its x coordinate and its time to first exec in milliseconds; `None` if it failed.
type Point = (f64, Option<f64>);

/// Draws the starts over the number of living sandboxes if sandboxes accumulate, or over the launch time for an
/// open loop. `None` for other scenarios, whose starts have no such order.
pub(super) fn draw(view: &View<'_>) -> Option<Markup> {
    let (points, label) = if view.scenario.hold.until == HoldUntil::End {
        (over_alive(view), "sandboxes alive")
    } else if matches!(view.scenario.arrival, Arrival::Open { .. }) {
        (over_time(view), "s since the first launch of the round")
    } else {
        return None;
    };
    if points.is_empty() {
        return None;
    }
    let drawn = thinned(&points);
    let all_drawn = drawn.len() == points.len();
    let max = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let x_max = max(&mut points.iter().map(|p| p.0));
    let limits = limits_ms(view);
    let ms = points.iter().filter_map(|p| p.1);
    let y_max = max(&mut ms.chain(limits.iter().copied()));
    let frame = Frame::new(300.0, x_max * 1.02, y_max * 1.05);
    let content = html! {
        @for limit in limits {
            @let y = place(frame.y(limit));
            line class="limit" x1=(place(frame.x(0.0))) x2=(place(frame.x(x_max))) y1=(y) y2=(y) {}
        }
        @for (x, ms) in &drawn {
            @match ms {
                Some(ms) => { circle class="point" cx=(place(frame.x(*x))) cy=(place(frame.y(*ms))) r="2" {} }
                None => { text class="failed" x=(place(frame.x(*x))) y=(place(frame.top() + 9.0)) { "×" } }
            }
        }
    };
    let what = if all_drawn {
        "each start"
    } else {
        "the slowest of neighbouring starts"
    };
    let entries = [(what.to_owned(), "var(--p8)".to_owned())];
    Some(html! {
        (frame.svg("latency of each start", label, "ms to first exec", &content))
        (legend(&entries))
    })
}

fn over_alive(view: &View<'_>) -> Vec<Point> {
    let starts = density::starts(view.summary).into_iter();
    starts
        .map(|start| (f64::from(start.alive), milliseconds(start.first_exec_ns)))
        .collect()
}

fn over_time(view: &View<'_>) -> Vec<Point> {
    let clones = view.summary.clones.iter();
    let mut points: Vec<Point> = clones
        .filter_map(|clone| {
            let base_ns = view.summary.rounds.get(&clone.round)?.base_ns;
            let at_s = clone.intended_ns.saturating_sub(base_ns) as f64 / 1e9;
            let ns = clone.latency_ns(StartPhase::FirstExec);
            Some((at_s, milliseconds(ns.unwrap_or(INFINITE))))
        })
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn milliseconds(ns: u64) -> Option<f64> {
    (ns != INFINITE).then_some(ns as f64 / 1e6)
}

/// The slowest start of each group of neighbours. A failed start is slower than any other.
fn thinned(points: &[Point]) -> Vec<Point> {
    let size = points.len().div_ceil(CIRCLES).max(1);
    let slowest = |group: &[Point]| {
        let slower = |a: &&Point, b: &&Point| {
            let ms = |point: &Point| point.1.unwrap_or(f64::INFINITY);
            ms(a).total_cmp(&ms(b))
        };
        group.iter().max_by(slower).copied()
    };
    points.chunks(size).filter_map(slowest).collect()
}

fn limits_ms(view: &View<'_>) -> Vec<f64> {
    let gates = view.scenario.gates.iter();
    gates
        .filter_map(|gate| match (gate.metric, gate.limit) {
            (Metric::Phase(StartPhase::FirstExec, _), Limit::Nanoseconds(ns)) => {
                Some(ns as f64 / 1e6)
            }
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_slowest_and_the_failed() {
        let few: Vec<Point> = (0..10).map(|n| (f64::from(n), Some(1.0))).collect();
        assert_eq!(thinned(&few), few);
        let mut many: Vec<Point> = (0..12_000).map(|n| (f64::from(n), Some(1.0))).collect();
        many[7003].1 = Some(504.0);
        many[9999].1 = None;
        let drawn = thinned(&many);
        assert_eq!(drawn.len(), CIRCLES);
        assert!(drawn.contains(&(7003.0, Some(504.0))) && drawn.contains(&(9999.0, None)));
    }
}
