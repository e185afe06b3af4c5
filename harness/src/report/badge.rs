//! Badges: one figure with its interval, host class and date as a small SVG that refers to no other file.

use maud::html;
use stats::quantile::Quantile;

use super::{View, document::Document, html::date, units::quantity};
use crate::{gate, scenario};

/// Widths in pixels: the mean of a character at 11 px, and the margin of a box.
const CHARACTER: f64 = 6.4;
const MARGIN: f64 = 8.0;
const HEIGHT: f64 = 36.0;

/// The badge of a figure. Figures have the names of gate metrics, such as `first_exec.p95`. `None` for an unknown name.
#[must_use]
pub fn render(view: &View<'_>, figure: &str) -> Option<String> {
    let found = evaluate(view, figure)?;
    let d = Document::new(view);
    let value = quantity(found.measured, &found.unit);
    let interval = found.interval95.map_or(String::new(), |[low, high]| {
        let [low, high] = [low, high].map(|end| quantity(Some(end), &found.unit));
        format!(" (95 %: {low} to {high})")
    });
    let value = format!("{value}{interval}, n = {}", found.n);
    let day: String = date(d.started_unix_ms).chars().take(10).collect();
    let below = format!("{}, {day}", d.place());
    let name = format!("{} {}", d.scenario, name_of(figure));
    let width = |text: &str| (text.chars().count() as f64 * CHARACTER + 2.0 * MARGIN).ceil();
    let left = width(&name);
    let whole = (left + width(&value)).max(width(&below));
    let title = format!("{name}: {value}; {below}");
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(whole) height=(HEIGHT) role="img" aria-label=(title)
            font-family="Verdana,sans-serif" font-size="11" {
            title { (title) }
            rect width=(whole) height=(HEIGHT) rx="4" fill="#24292f" {}
            rect x=(left) width=(whole - left) height="20" rx="4" fill="#0969da" {}
            text x=(MARGIN) y="14" fill="#fff" { (name) }
            text x=(left + MARGIN) y="14" fill="#fff" { (value) }
            text x=(MARGIN) y="31" fill="#d0d7de" font-size="10" { (below) }
        }
    };
    Some(svg.into_string())
}

/// The figure as gates measure it.
fn evaluate(view: &View<'_>, figure: &str) -> Option<gate::GateResult> {
    let quoted = toml::Value::from(figure);
    // Each kind of metric has limits of its own unit; the limit does not matter here.
    let gate = ["1h", "1", "1GB", "1/s", "1%"].iter().find_map(|limit| {
        let text = format!("[[gates]]\nname = \"figure\"\nmetric = {quoted}\nlimit = \"{limit}\"");
        let gates = scenario::parse("figure", &text).ok()?.gates;
        gates.into_iter().next()
    })?;
    let class = view.facts.class();
    let results = gate::judge(&[gate], view.summary, view.graded.grade, Some(&class));
    results.into_iter().next()
}

/// `first_exec.p95` as `first exec P95`.
fn name_of(figure: &str) -> String {
    let word = |word: &str| match Quantile::ALL.iter().find(|q| q.name() == word) {
        Some(quantile) => quantile.name().to_uppercase(),
        None => word.replace('_', " "),
    };
    figure.split('.').map(word).collect::<Vec<_>>().join(" ")
}
