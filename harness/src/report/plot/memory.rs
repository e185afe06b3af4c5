//! Decrease of available memory over the number of clones.

use maud::{Markup, html};
use stats::chart::{Frame, legend, place};

use crate::{
    report::{View, units::mb},
    summary::fold::available,
};

/// Draws the samples of all groups, each relative to the first sample of its group, and the fitted line.
pub(super) fn draw(view: &View<'_>) -> Markup {
    let points = points(view);
    let Some(slope) = view.summary.memory_slope() else {
        return html! { p { "Memory was not sampled." } };
    };
    let x_max = points.iter().map(|p| p.0).fold(0.0, f64::max);
    let y_max = points
        .iter()
        .map(|p| p.1)
        .fold(slope.value * x_max / 1e6, f64::max);
    let frame = Frame::new(300.0, x_max * 1.02, y_max * 1.05);
    let end = (slope.value * x_max / 1e6).max(0.0);
    let content = html! {
        line class="curve" style="stroke:var(--wait)" x1=(place(frame.x(0.0))) y1=(place(frame.y(0.0)))
            x2=(place(frame.x(x_max))) y2=(place(frame.y(end))) {}
        @for (x, y) in &points {
            circle class="point" cx=(place(frame.x(*x))) cy=(place(frame.y(y.max(0.0)))) r="3.5" {}
        }
    };
    let entries = [
        ("samples".to_owned(), "var(--p8)".to_owned()),
        (
            format!("{} per clone", mb(Some(slope.value))),
            "var(--wait)".to_owned(),
        ),
    ];
    html! {
        (frame.svg("memory over clones", "clones alive", "MB less available", &content))
        (legend(&entries))
    }
}

/// Points of the plot: the number of clones, and the decrease of available memory in megabytes (10^6) since the first
/// sample of the group.
fn points(view: &View<'_>) -> Vec<(f64, f64)> {
    let samples = &view.summary.memory;
    samples
        .iter()
        .filter_map(|point| {
            let first = samples.iter().find(|p| p.group == point.group)?;
            Some((
                f64::from(point.alive),
                (available(first)? - available(point)?) / 1e6,
            ))
        })
        .collect()
}
