//! The main costs of a report: folding the events of a long run, and computing a percentile with its confidence
//! interval.

#[path = "../tests/support/recorded.rs"]
mod recorded;

use criterion::{Criterion, criterion_group, criterion_main};
use harness::{scenario::Quantile, summary::fold::fold};
use model::StartPhase;
use stats::quantile::Samples;

fn benches(c: &mut Criterion) {
    let events = recorded::events(250);
    c.bench_function("fold 10 000 attempts", |b| b.iter(|| fold(&events)));
    let summary = fold(&events);
    c.bench_function("P99 with its interval of 5 000 starts", |b| {
        b.iter(|| {
            let samples: Samples = summary.phase(StartPhase::FirstExec);
            (
                samples.quantile(Quantile::P99),
                samples.interval95(Quantile::P99),
            )
        });
    });
}

criterion_group!(group, benches);
criterion_main!(group);
