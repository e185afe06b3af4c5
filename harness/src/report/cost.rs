//! The cost of starts and of the pool in reports.

use serde::{Deserialize, Serialize};

use super::units::mb;
use crate::{
    event::Spent,
    plan::Subject,
    scenario::HoldUntil,
    summary::{
        cost::{self, Rate},
        fold::Summary,
    },
};

/// Rates and costs of a run. Values that could not be determined are `null`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostDocument {
    /// Starts per second to first exec, from the base of each measured round to its end. `null` without a server.
    pub drain_per_s: Option<f64>,
    /// Starts per second, if a round counts until its sandboxes are killed and the pool is full again. `null` if
    /// sandboxes are held, and for a server that the run did not start.
    pub sustainable_per_s: Option<f64>,
    /// CPU time of the target's processes per start, until the pool is full again.
    pub cpu_per_start: Option<CpuDocument>,
    /// The same for the comparison rounds: the VMMs.
    pub beside_cpu_per_start: Option<CpuDocument>,
    /// The same for the baseline: the processes.
    pub baseline_cpu_per_start: Option<CpuDocument>,
    /// `null` unless the target has a pool on this host.
    pub pool: Option<PoolDocument>,
}

/// Mean CPU time of a start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuDocument {
    pub ms: f64,
    /// 95 % confidence interval by bootstrap over rounds; `null` with too few rounds.
    pub ci95_ms: Option<[f64; 2]>,
    pub rounds: usize,
}

/// Cost of a warm pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolDocument {
    /// Warm slots at the beginning of a round.
    pub slots: u32,
    /// Share of measured starts that came from a warm slot, failed ones included, 0 to 1.
    pub hit_rate: Option<f64>,
    /// Memory of an idle warm slot.
    pub idle_slot_bytes: Option<f64>,
    /// Memory of the server without templates.
    pub server_bytes: Option<f64>,
    /// Templates that the server has loaded into memory.
    pub templates_bytes: Option<f64>,
    /// Median time from the end of a round's last start until the pool is full again.
    pub until_full_ms: Option<f64>,
    /// Slots that were refilled while measured rounds of the target ran.
    pub refilled_during_rounds: Option<u64>,
    /// CPU milliseconds per second of the server and its idle slots while measured rounds of others ran.
    pub ms_per_s_in_other_rounds: Option<f64>,
}

impl CostDocument {
    #[must_use]
    pub fn new(summary: &Summary) -> Self {
        let cpu = |subject| CpuDocument::new(&cost::cpu_ns_per_start(summary, subject));
        Self {
            drain_per_s: cost::drain(summary).value(),
            sustainable_per_s: cost::sustainable(summary).value(),
            cpu_per_start: cpu(Subject::Clone),
            beside_cpu_per_start: cpu(Subject::Beside),
            baseline_cpu_per_start: cpu(Subject::HostProcess),
            pool: PoolDocument::new(summary),
        }
    }

    /// Rows for people: name and value. `beside` is the name of the comparison rounds. Rates and times of starts
    /// are omitted if rounds have different rates.
    #[must_use]
    pub fn rows(&self, beside: &str, several_rates: bool) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            rows.extend(value.map(|value| (name.to_owned(), value)));
        };
        let one_rate = |value: Option<String>| value.filter(|_| !several_rates);
        let rate =
            |rate: Option<f64>| one_rate(rate.map(|rate| format!("{rate:.1} starts per second")));
        add("drain rate", rate(self.drain_per_s));
        add(
            match self.pool {
                Some(_) => "sustainable rate, with refill and kill",
                None => "sustainable rate, with kill",
            },
            rate(self.sustainable_per_s),
        );
        let cpu = |of: &Option<CpuDocument>| of.as_ref().map(CpuDocument::render);
        add(
            match self.pool {
                Some(_) => "CPU per start, with refill and kill",
                None => "CPU per start, with kill",
            },
            cpu(&self.cpu_per_start),
        );
        add(
            &format!("CPU per start, {beside}"),
            cpu(&self.beside_cpu_per_start),
        );
        add(
            "CPU per start, host process",
            cpu(&self.baseline_cpu_per_start),
        );
        let Some(pool) = &self.pool else {
            return rows;
        };
        let hits = pool
            .hit_rate
            .map(|share| format!("{:.1} % of starts", share * 100.0));
        add("starts from a warm slot", hits);
        let bytes = |of: Option<f64>| of.map(|_| mb(of));
        add(
            &format!("memory of an idle slot, of {}", pool.slots),
            bytes(pool.idle_slot_bytes),
        );
        add("memory of loaded templates", bytes(pool.templates_bytes));
        add(
            "memory of the server without templates",
            bytes(pool.server_bytes),
        );
        let full = pool
            .until_full_ms
            .map(|ms| format!("{ms:.0} ms after the last start, median"));
        add("pool full again", one_rate(full));
        let refilled = pool.refilled_during_rounds.map(|slots| match slots {
            0 => "none".to_owned(),
            slots => format!("{slots} slots: the times of these rounds contain refill"),
        });
        add("refill during measured rounds of the target", refilled);
        let idle = pool.ms_per_s_in_other_rounds;
        let idle = idle.map(|ms| format!("{ms:.1} ms of CPU per second, with idle slots"));
        add("server during rounds that do not use it", idle);
        rows
    }
}

impl CpuDocument {
    fn new(rate: &Rate) -> Option<Self> {
        Some(Self {
            ms: rate.value()? / 1e6,
            ci95_ms: rate.interval95().map(|(low, high)| [low / 1e6, high / 1e6]),
            rounds: rate.rounds(),
        })
    }

    fn render(&self) -> String {
        let interval = self.ci95_ms.map_or(String::new(), |[low, high]| {
            format!(" (95 % {low:.2} to {high:.2})")
        });
        format!("{:.2} ms{interval}, {} rounds", self.ms, self.rounds)
    }
}

impl PoolDocument {
    fn new(summary: &Summary) -> Option<Self> {
        let slots = summary.spent.iter().filter_map(|s| s.warm).max()?;
        let idle: Vec<&Spent> = only_idle(summary).collect();
        let memory = |bytes: &dyn Fn(&Spent) -> Option<f64>| {
            median(idle.iter().filter_map(|spent| bytes(spent)).collect())
        };
        Some(Self {
            slots,
            hit_rate: cost::hit_rate(summary.clones.iter()),
            idle_slot_bytes: memory(&|s| {
                let slots = s.warm.filter(|slots| *slots > 0)?;
                Some(s.memory?.vms_bytes as f64 / f64::from(slots))
            }),
            server_bytes: memory(&|s| Some(s.memory?.server_bytes as f64)),
            templates_bytes: memory(&|s| Some(s.memory?.templates_bytes as f64)),
            until_full_ms: median(cost::until_full_ms(summary)),
            refilled_during_rounds: cost::refilled_during_rounds(summary),
            ms_per_s_in_other_rounds: cost::server_ns_per_s_in_other_rounds(summary)
                .value()
                .map(|ns| ns / 1e6),
        })
    }
}

/// Rounds before which the pool contained only idle slots: all rounds, or only the first if clones are held to the
/// end.
fn only_idle(summary: &Summary) -> impl Iterator<Item = &Spent> {
    let held = summary
        .scenario()
        .is_some_and(|s| s.hold.until == HoldUntil::End);
    let rounds = if held { 1 } else { usize::MAX };
    summary.spent.iter().take(rounds)
}

/// `None` without values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}
