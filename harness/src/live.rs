//! A progress line on the terminal during a run.

use std::io::Write;

use model::StartPhase;
use testbed::quantile::nearest_rank;

use crate::{
    event::RunEvent,
    plan::{Row, Subject},
};

/// State of the progress line, which is redrawn after each round.
pub(crate) struct LiveView<W: Write> {
    out: W,
    /// Measured rounds of the plan.
    rounds: u32,
    rounds_done: u32,
    failed: u64,
    /// First-exec latencies of measured clones so far, in nanoseconds.
    first_exec_ns: Vec<u64>,
}

impl<W: Write> LiveView<W> {
    pub(crate) fn new(rounds: u32, out: W) -> Self {
        Self {
            out,
            rounds,
            rounds_done: 0,
            failed: 0,
            first_exec_ns: Vec::new(),
        }
    }

    pub(crate) fn apply(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Attempt(attempt)
                if attempt.row == Row::Measured && attempt.subject == Subject::Clone =>
            {
                match attempt.latency_ns(StartPhase::FirstExec) {
                    Some(ns) => self.first_exec_ns.push(ns),
                    None => self.failed += 1,
                }
            }
            RunEvent::RoundEnded { .. } => {
                self.rounds_done += 1;
                self.draw();
            }
            RunEvent::RunEnded { .. } => {
                // Erase the line: the report follows.
                let _ = write!(self.out, "\r\x1b[K");
                let _ = self.out.flush();
            }
            _ => {}
        }
    }

    fn draw(&mut self) {
        self.first_exec_ns.sort_unstable();
        let ms = |permille| {
            let ns = nearest_rank(&self.first_exec_ns, permille).unwrap_or(0);
            ns as f64 / 1e6
        };
        let (p50, p95) = (ms(500), ms(950));
        // A closed terminal must not stop the run.
        let _ = write!(
            self.out,
            "\r\x1b[Krounds done {} (measured: {})  starts {}  failed {}  first exec so far {p50:.1} / {p95:.1} ms \
             (P50 / P95)",
            self.rounds_done,
            self.rounds,
            self.first_exec_ns.len(),
            self.failed,
        );
        let _ = self.out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_rounds_and_is_erased_at_the_end() {
        let mut out = Vec::new();
        let mut view = LiveView::new(2, &mut out);
        view.apply(&RunEvent::RoundEnded { round: 0, at_ns: 1 });
        view.apply(&RunEvent::RunEnded {
            why: crate::event::EndReason::Complete,
            at_ns: 2,
        });
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("rounds done 1 (measured: 2)"), "{text}");
        assert!(text.ends_with("\r\x1b[K"), "{text:?}");
    }
}
