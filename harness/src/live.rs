//! Progress of a run on standard error: one redrawn line on a terminal, otherwise one line per minute.

use std::{collections::BTreeSet, io::Write};

use model::StartPhase;
use stats::rank::nearest_rank;

use crate::{
    event::RunEvent,
    plan::{Plan, Row, Subject},
    scenario::InterferenceSpec,
    summary::interference::is_judged,
};

const SECOND_NS: u64 = 1_000_000_000;
/// Number of disturbed rounds after which the run says so.
const ANNOUNCED: usize = 2;

/// Output medium of the progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// One line, redrawn at most once per second.
    Terminal,
    /// A line each minute.
    Log,
}

impl Medium {
    fn interval_ns(self) -> u64 {
        match self {
            Self::Terminal => SECOND_NS,
            Self::Log => 60 * SECOND_NS,
        }
    }
}

/// State of the progress.
pub(crate) struct LiveView<W: Write> {
    out: W,
    medium: Medium,
    /// Rule that leaves out disturbed rounds, and the rounds that it judges.
    rule: Option<InterferenceSpec>,
    judged: BTreeSet<u32>,
    disturbed: usize,
    rounds: usize,
    rounds_done: usize,
    /// Starts of all subjects.
    starts: usize,
    starts_done: usize,
    failed: u64,
    /// First-exec latencies of measured clones so far, in nanoseconds.
    first_exec_ns: Vec<u64>,
    /// Time of the first event; `None` before it.
    began_ns: Option<u64>,
    shown_ns: u64,
}

impl<W: Write> LiveView<W> {
    pub(crate) fn new(plan: &Plan, rule: Option<InterferenceSpec>, medium: Medium, out: W) -> Self {
        let judged = plan.rounds.iter();
        let judged = judged.filter(|r| r.row == Row::Measured && is_judged(r.subject));
        Self {
            rule,
            judged: judged.map(|round| round.index).collect(),
            disturbed: 0,
            out,
            medium,
            rounds: plan.rounds.len(),
            rounds_done: 0,
            starts: plan.rounds.iter().map(|round| round.arrivals.len()).sum(),
            starts_done: 0,
            failed: 0,
            first_exec_ns: Vec::new(),
            began_ns: None,
            shown_ns: 0,
        }
    }

    /// Counts an event, and redraws the progress if it is due. `now_ns` is CLOCK_MONOTONIC.
    pub(crate) fn apply(&mut self, event: &RunEvent, now_ns: u64) {
        if self.began_ns.is_none() {
            self.began_ns = Some(now_ns);
            self.shown_ns = now_ns;
        }
        match event {
            RunEvent::Attempt(attempt) => {
                self.starts_done += 1;
                if attempt.row == Row::Measured && attempt.subject == Subject::Clone {
                    match attempt.latency_ns(StartPhase::FirstExec) {
                        Some(ns) => self.first_exec_ns.push(ns),
                        None => self.failed += 1,
                    }
                }
            }
            RunEvent::RoundUsage { round, usage } if self.judged.contains(round) => {
                let why = self.rule.and_then(|rule| rule.disturbs(usage));
                if let Some(why) = why {
                    self.disturbed(&why, usage.client_only);
                }
            }
            RunEvent::RoundEnded { .. } => self.rounds_done += 1,
            RunEvent::RunEnded { .. } => {
                if self.medium == Medium::Terminal {
                    // Erase the line: the report follows.
                    self.write("\r\x1b[K");
                }
                return;
            }
            _ => {}
        }
        if now_ns.saturating_sub(self.shown_ns) >= self.medium.interval_ns() {
            self.shown_ns = now_ns;
            let line = self.line(now_ns);
            match self.medium {
                Medium::Terminal => self.write(&format!("\r\x1b[K{line}")),
                Medium::Log => self.write(&format!("cube-bench: {line}\n")),
            }
        }
    }

    /// Announces once that rounds will not count, early enough to stop the run.
    fn disturbed(&mut self, why: &str, is_client: bool) {
        self.disturbed += 1;
        if self.disturbed == ANNOUNCED {
            let line = match self.medium {
                Medium::Terminal => "\r\x1b[K",
                Medium::Log => "",
            };
            let judged = self.judged.len();
            let or_name = if is_client {
                ", or name a measured server on this host with --server-pid"
            } else {
                ""
            };
            self.write(&format!(
                "{line}cube-bench: {ANNOUNCED} of {judged} rounds will not count so far, unless a start fails in them: \
                 {why}. Stop the other programs{or_name}, or raise interference.foreign_cpu_share\n"
            ));
        }
    }

    fn line(&mut self, now_ns: u64) -> String {
        self.first_exec_ns.sort_unstable();
        let ms = |permille| {
            let ns = nearest_rank(&self.first_exec_ns, permille).unwrap_or(0);
            ns as f64 / 1e6
        };
        let (p50, p95) = (ms(500), ms(950));
        format!(
            "{} of {} rounds, {} of {} starts, {} failed, first exec so far {p50:.1} / {p95:.1} ms (P50 / P95){}",
            self.rounds_done,
            self.rounds,
            self.starts_done,
            self.starts,
            self.failed,
            self.left(now_ns)
        )
    }

    /// Remaining time, if each start takes as long as those so far. Empty before the first start.
    fn left(&self, now_ns: u64) -> String {
        let took_ns = now_ns.saturating_sub(self.began_ns.unwrap_or(now_ns));
        let rest = self.starts.saturating_sub(self.starts_done) as u64;
        let per_start = took_ns.checked_div(self.starts_done as u64);
        let Some(left_ns) = per_start.map(|ns| ns.saturating_mul(rest)) else {
            return String::new();
        };
        match left_ns / SECOND_NS {
            seconds @ 0..120 => format!(", about {seconds} s left"),
            seconds => format!(", about {} min left", seconds.div_ceil(60)),
        }
    }

    fn write(&mut self, text: &str) {
        // A closed terminal must not stop the run.
        let _ = self.out.write_all(text.as_bytes());
        let _ = self.out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::EndReason,
        plan::{Round, Start},
    };

    const BEGAN_NS: u64 = 1000 * SECOND_NS;

    fn plan() -> Plan {
        let round = |index| Round {
            index,
            subject: Subject::HostProcess,
            row: Row::Measured,
            rate_per_s: None,
            workers: 1,
            arrivals: vec![Start::WhenFree; 50],
            work: Vec::new(),
            lifetimes_ms: Vec::new(),
            templates: Vec::new(),
        };
        Plan {
            rounds: (0..4).map(round).collect(),
        }
    }

    /// The output for a run of four rounds, each of which takes `round_s` seconds.
    fn shown(medium: Medium, round_s: u64) -> String {
        let mut out = Vec::new();
        let mut view = LiveView::new(&plan(), None, medium, &mut out);
        let ended = RunEvent::RoundEnded { round: 0, at_ns: 1 };
        view.apply(
            &RunEvent::Stock {
                round: 0,
                at_ns: 0,
                warm: 0,
            },
            BEGAN_NS,
        );
        for round in 1..=4 {
            view.starts_done += 50;
            view.apply(&ended, BEGAN_NS + round * round_s * SECOND_NS);
        }
        let why = EndReason::Complete;
        view.apply(&RunEvent::RunEnded { why, at_ns: 2 }, u64::MAX);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_terminal_has_one_line_that_is_erased_at_the_end() {
        let text = shown(Medium::Terminal, 2);
        assert!(text.contains("1 of 4 rounds, 50 of 200 starts"), "{text}");
        assert!(text.contains("about 6 s left"), "{text}");
        assert!(
            !text.contains('\n') && text.ends_with("\r\x1b[K"),
            "{text:?}"
        );
    }

    #[test]
    fn rounds_that_will_not_count_are_announced_once_after_the_second() {
        let usage = |foreign_ns, client_only| RunEvent::RoundUsage {
            round: 1,
            usage: crate::event::RoundUsage {
                wall_ns: 1000,
                own_cpu_ns: Some(0),
                foreign_cpu_ns: Some(foreign_ns),
                kernel_cpu_ns: Some(0),
                client_only,
                cores: 1,
                memory_wait_share: None,
                cpu_wait_share: None,
            },
        };
        let rule = InterferenceSpec {
            foreign_cpu_share: 0.1,
            memory_wait_share: 0.1,
        };
        let announced = |usages: &[u64], client_only| {
            let mut out = Vec::new();
            let mut view = LiveView::new(&plan(), Some(rule), Medium::Log, &mut out);
            for foreign_ns in usages {
                view.apply(&usage(*foreign_ns, client_only), BEGAN_NS);
            }
            String::from_utf8(out).unwrap()
        };
        assert_eq!(announced(&[800, 50, 50], false), "");
        let text = announced(&[800, 50, 700, 900, 900], false);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            text.contains("2 of 4 rounds will not count") && text.contains("70 %"),
            "{text}"
        );
        assert!(!text.contains("--server-pid"), "{text}");
        let text = announced(&[950, 950], true);
        assert!(text.contains("--server-pid"), "{text}");
    }

    #[test]
    fn a_log_has_a_line_each_minute() {
        assert_eq!(shown(Medium::Log, 2), "", "a short run has none");
        let text = shown(Medium::Log, 40);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].starts_with("cube-bench: 2 of 4 rounds"), "{text}");
        assert!(lines[0].ends_with("about 80 s left"), "{text}");
        assert!(shown(Medium::Log, 90).contains("about 5 min left"));
    }
}
