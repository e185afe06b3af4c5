//! First exec of each system of a comparison.

use maud::{Markup, html};

use crate::report::{
    peers::{PeersDocument, SystemDocument},
    units::milliseconds,
};

/// Draws P50 to P95 of each system on a logarithmic axis; `None` if no system has them.
pub(super) fn draw(peers: &PeersDocument) -> Option<Markup> {
    const LEFT: f64 = 150.0;
    const WIDTH: f64 = 560.0;
    const ROW: f64 = 24.0;
    let ends = |system: &SystemDocument| {
        let phase = system.first_exec.as_ref()?;
        Some((phase.p50_ms?, phase.p95_ms.or(phase.p50_ms)?))
    };
    let all: Vec<(&str, (f64, f64))> = peers
        .systems
        .iter()
        .filter_map(|system| Some((system.name.as_str(), ends(system)?)))
        .collect();
    let low = all.iter().map(|(_, (p50, _))| p50.log10().floor());
    let low = low.min_by(f64::total_cmp).unwrap_or(0.0);
    let high = all.iter().map(|(_, (_, p95))| p95.log10().ceil());
    let high = high.max_by(f64::total_cmp).unwrap_or(1.0).max(low + 1.0);
    let x = |ms: f64| LEFT + (ms.log10() - low) / (high - low) * WIDTH;
    let height = ROW * (all.len() as f64 + 1.0);
    let mut decades = Vec::new();
    let mut decade = low;
    while decade <= high {
        decades.push(10_f64.powf(decade));
        decade += 1.0;
    }
    if all.is_empty() {
        return None;
    }
    Some(html! {
        svg viewBox=(format!("0 0 760 {height}")) role="img" {
            title { "P50 to P95 of first exec of each system" }
            @for ms in decades {
                line.grid x1=(x(ms)) x2=(x(ms)) y1="0" y2=(height - ROW) {}
                text.tick x=(x(ms)) y=(height - 6.0) text-anchor="middle" { (format!("{ms} ms")) }
            }
            @for (n, (name, (p50, p95))) in all.iter().enumerate() {
                @let y = ROW * (n as f64 + 0.5);
                text.label x=(LEFT - 8.0) y=(y + 4.0) text-anchor="end" { (name) }
                line x1=(x(*p50)) x2=(x(*p95)) y1=(y) y2=(y) stroke="var(--p1)" stroke-width="6" {}
                circle cx=(x(*p50)) cy=(y) r="5" fill="var(--p1)" {
                    title { (name) ": P50 " (milliseconds(*p50)) " ms, P95 " (milliseconds(*p95)) " ms" }
                }
            }
        }
    })
}
