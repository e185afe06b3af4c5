//! Detects whether a guest has pending work.
//!
//! Every clone would repeat work that is pending in the snapshot, and be slower in its first milliseconds. A guest is
//! quiet when its vCPU is halted, so that no task is runnable and no device has work for it, and no timer of its kernel
//! is due within [`NEAR`]. The VMM reports both, so no program in the guest has to run for this. Later timers are
//! harmless: a Linux kernel always has some (statistics of the block layer each 100 ms for two seconds after the last
//! request, load averages each 2 s), and the guest's clock stands still until a clone runs.

use std::{
    collections::BTreeMap,
    fmt, fs, thread,
    time::{Duration, Instant},
};

use envd::guest_text;
use vmm_control::{ControlClient, ControlError, VmProcess, VmStats};

use crate::{agent::Guest, error::Cause};

/// A timer due earlier than this would fire in a clone's first milliseconds.
const NEAR: Duration = Duration::from_millis(50);
/// The snapshot is taken after this time even if the guest is not quiet. Clones are then only slower.
const LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks.
const STEP: Duration = Duration::from_millis(2);
/// On the platform `hvm`, the VMM cannot detect that a vCPU is halted. There, a guest counts as quiet when its VMM has
/// used at most this share of the CPU for [`NEAR`].
const IDLE_SHARE: u32 = 50;

/// Prints `/proc/*/stat` twice, with a line between.
const PROCESSES: &str =
    "cat /proc/[0-9]*/stat 2>/dev/null; echo; sleep 0.5; cat /proc/[0-9]*/stat 2>/dev/null; true";

/// Result of the wait for a quiet guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// The guest was quiet after this time.
    After(Duration),
    /// The guest was not quiet within ten seconds, for this reason. Its clones may be slower in their first
    /// milliseconds.
    Never(String),
}

impl fmt::Display for Quiet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::After(time) => write!(f, "quiet after {} ms", time.as_millis()),
            Self::Never(why) => write!(f, "not quiet within {} s: {why}", LIMIT.as_secs()),
        }
    }
}

/// Waits until the guest is quiet, or until [`LIMIT`].
pub(crate) fn wait(vm: &mut VmProcess, guest: Guest<'_>) -> Result<Quiet, Cause> {
    let pid = vm.pid();
    let quiet = until_quiet(&mut vm.control, pid)?;
    Ok(quiet.map_or_else(|| Quiet::Never(reason(guest)), Quiet::After))
}

/// Waits until the guest of a running VM has no pending work, for at most ten seconds. Returns the duration, or `None`
/// if the guest never became quiet. `pid` is the process id of the VMM.
///
/// # Errors
/// Returns the errors of [`ControlClient::stats`].
pub fn until_quiet(
    control: &mut ControlClient,
    pid: u32,
) -> Result<Option<Duration>, ControlError> {
    let started = Instant::now();
    let mut usage = Usage::default();
    while started.elapsed() < LIMIT {
        let stats = control.stats()?;
        if is_quiet(&stats) || (is_blind(&stats) && usage.is_low(pid)) {
            return Ok(Some(started.elapsed()));
        }
        thread::sleep(STEP);
    }
    Ok(None)
}

fn is_quiet(stats: &VmStats) -> bool {
    stats
        .idle_ns
        .is_some_and(|left| Duration::from_nanos(left) >= NEAR)
}

/// Whether the VMM cannot detect halts: every guest that has booted has halted.
fn is_blind(stats: &VmStats) -> bool {
    stats.idle_ns.is_none() && !stats.exits.contains_key("idle")
}

/// CPU time of a VMM since the last check at which it was above the limit.
#[derive(Debug, Default)]
struct Usage(Option<(Instant, u64)>);

impl Usage {
    fn is_low(&mut self, pid: u32) -> bool {
        let Some(used) = cpu_ns(pid) else {
            return false;
        };
        let (since, before) = *self.0.get_or_insert((Instant::now(), used));
        let most = NEAR.as_nanos() / u128::from(IDLE_SHARE);
        if u128::from(used.saturating_sub(before)) > most {
            self.0 = Some((Instant::now(), used));
            return false;
        }
        since.elapsed() >= NEAR
    }
}

/// CPU time of all threads of a process (proc(5), `/proc/pid/schedstat`).
fn cpu_ns(pid: u32) -> Option<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let used = |path: &std::path::Path| {
        let text = fs::read_to_string(path.join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some(tasks.flatten().filter_map(|t| used(&t.path())).sum())
}

/// The reason why a guest is not quiet: the process that uses the CPU most, according to the guest.
fn reason(guest: Guest<'_>) -> String {
    let script = ["/bin/sh", "-c", PROCESSES].map(str::to_owned);
    let seen = match guest.run(&script, Some("root")) {
        Ok(seen) => seen,
        Err(error) => {
            let error = model::chain(&error);
            return format!("a process or its kernel keeps its CPU busy ({error})");
        }
    };
    match busiest(&String::from_utf8_lossy(&seen)) {
        Some((pid, name)) => {
            let name = guest_text(&name);
            format!(
                "process {pid} ({name}) uses the CPU; let the ready command wait until it rests"
            )
        }
        None => format!(
            "no process uses the CPU, but timers are due every {} ms or more often",
            NEAR.as_millis()
        ),
    }
}

/// The process whose CPU time increased most between the two listings (proc(5), `/proc/pid/stat`).
fn busiest(listings: &str) -> Option<(u32, String)> {
    let (before, after) = listings.split_once("\n\n")?;
    let before: BTreeMap<_, _> = before.lines().filter_map(ticks).collect();
    let (pid, name, grown) = after
        .lines()
        .filter_map(ticks)
        .filter_map(|(id, now)| {
            let grown = now.saturating_sub(*before.get(&id)?);
            Some((id.0, id.1, grown))
        })
        .max_by_key(|(_, _, grown)| *grown)?;
    (grown > 0).then_some((pid, name))
}

/// The pid and name of a process, and its CPU time in ticks. The name may contain spaces and parentheses.
fn ticks(line: &str) -> Option<((u32, String), u64)> {
    let (pid, rest) = line.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    // Fields 14 and 15 of the line; the state is field 3.
    let time = |at: usize| fields.get(at - 3)?.parse::<u64>().ok();
    let id = (pid.parse().ok()?, name.to_owned());
    Some((id, time(14)?.saturating_add(time(15)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pid: u32, name: &str, user: u64, system: u64) -> String {
        format!("{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 {user} {system} 0 0 20 0 1 0 100 0 0")
    }

    #[test]
    fn the_busiest_process_is_named_whatever_its_name_is() {
        let before = [
            line(1, "agent", 5, 5),
            line(7, "a ) (b", 10, 0),
            "garbage".into(),
        ]
        .join("\n");
        let after = [
            line(1, "agent", 5, 6),
            line(7, "a ) (b", 20, 30),
            line(9, "new", 99, 0),
        ]
        .join("\n");
        let listings = format!("{before}\n\n{after}\n");
        assert_eq!(busiest(&listings), Some((7, "a ) (b".to_owned())));
        assert_eq!(busiest(&format!("{before}\n\n{before}\n")), None);
        assert_eq!(busiest(""), None);
    }
}
