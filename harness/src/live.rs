//! One line on a terminal while a run goes on. Its quantiles come from a histogram with two digits and
//! are for watching; results come from the raw samples.

use std::io::Write;

use hdrhistogram::Histogram;
use model::StartPhase;

use crate::{
    event::RunEvent,
    plan::{Row, Subject},
};

/// The line.
pub(crate) struct LiveView<W: Write> {
    out: W,
    rounds: u32,
    rounds_done: u32,
    failed: u64,
    /// First-exec latencies in microseconds; absent when it could not be made.
    first_exec_us: Option<Histogram<u64>>,
}

impl<W: Write> LiveView<W> {
    pub(crate) fn new(rounds: u32, out: W) -> Self {
        Self {
            out,
            rounds,
            rounds_done: 0,
            failed: 0,
            // One microsecond to ten minutes.
            first_exec_us: Histogram::new_with_bounds(1, 600_000_000, 2).ok(),
        }
    }

    pub(crate) fn apply(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Attempt(attempt)
                if attempt.row == Row::Measured && attempt.subject == Subject::Clone =>
            {
                match attempt.latency_ns(StartPhase::FirstExec) {
                    Some(ns) => {
                        if let Some(histogram) = &mut self.first_exec_us {
                            histogram.saturating_record((ns / 1000).max(1));
                        }
                    }
                    None => self.failed += 1,
                }
            }
            RunEvent::RoundEnded { .. } => {
                self.rounds_done += 1;
                self.draw();
            }
            RunEvent::RunEnded { .. } => {
                // Wipes the line; the report follows.
                let _ = write!(self.out, "\r\x1b[K");
                let _ = self.out.flush();
            }
            _ => {}
        }
    }

    fn draw(&mut self) {
        let Some(histogram) = &self.first_exec_us else {
            return;
        };
        let ms = |permille: f64| histogram.value_at_quantile(permille) as f64 / 1000.0;
        // A terminal that is gone is no reason to stop a run.
        let _ = write!(
            self.out,
            "\r\x1b[Krounds done {} (measured: {})  starts {}  failed {}  first exec about {:.1} / {:.1} ms (P50 / P95)",
            self.rounds_done,
            self.rounds,
            histogram.len(),
            self.failed,
            ms(0.5),
            ms(0.95),
        );
        let _ = self.out.flush();
    }
}
