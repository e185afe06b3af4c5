//! Counters of a VMM, and their increments during stages of its life.

use std::{fmt, fs, path::Path, time::Instant};

use anyhow::{Context, Result};

pub(crate) const LEGEND: &str = "CPU and wall in ms; host: minor faults of the VMM; own: guest pages that are \
    the clone's by then; shadow: entries that KVM set, in one life apart";

/// A stage of a clone's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// From the start of the VMM until the guest has its identity.
    Start,
    /// From connecting to the end of the response.
    First,
    /// The same cell again, on the same connection.
    Second,
    /// From the kill until the process is reaped.
    End,
    /// Start, first cell and end together.
    Life,
}

impl Stage {
    pub(crate) const ALL: [Self; 5] = [
        Self::Start,
        Self::First,
        Self::Second,
        Self::End,
        Self::Life,
    ];
}

impl fmt::Display for Stage {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Self::Start => "start",
            Self::First => "first",
            Self::Second => "second",
            Self::End => "end",
            Self::Life => "life",
        })
    }
}

/// The cost of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    pub(crate) cpu_ns: u64,
    pub(crate) wall_ns: u64,
    pub(crate) minor_faults: u64,
    /// Shadow page table entries; `None` without tracing.
    pub(crate) shadow: Option<u64>,
    /// The VMM's own pages at the end of the stage, not an increment.
    pub(crate) own_pages: Option<u64>,
}

impl Cost {
    pub(crate) fn add(&mut self, other: &Self) {
        self.cpu_ns += other.cpu_ns;
        self.wall_ns += other.wall_ns;
        self.minor_faults += other.minor_faults;
        self.shadow = match (self.shadow, other.shadow) {
            (Some(mine), Some(theirs)) => Some(mine + theirs),
            (mine, theirs) => mine.or(theirs),
        };
        self.own_pages = other.own_pages.or(self.own_pages);
    }
}

/// Counters at a point in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counters {
    at: Instant,
    pub(crate) cpu_ns: u64,
    minor_faults: u64,
}

impl Counters {
    /// The counters of a process that does not exist.
    pub(crate) fn zero() -> Self {
        Self {
            at: Instant::now(),
            cpu_ns: 0,
            minor_faults: 0,
        }
    }

    /// Reads the counters of a VMM.
    ///
    /// # Errors
    /// Returns an error if the process has ended.
    pub(crate) fn read(pid: u32) -> Result<Self> {
        let at = Instant::now();
        let proc = Path::new("/proc").join(pid.to_string());
        let schedstat = fs::read_to_string(proc.join("schedstat"))?;
        let stat = fs::read_to_string(proc.join("stat"))?;
        // Fields are counted from the end of the name, which may contain any character (proc_pid_stat(5)).
        let (_, fields) = stat
            .rsplit_once(')')
            .context("a stat file without a name")?;
        Ok(Self {
            at,
            cpu_ns: field(&schedstat, 0)?,
            minor_faults: field(fields, 7)?,
        })
    }

    /// The increments of the counters from this point in time to a later one.
    pub(crate) fn to(self, later: Self) -> Cost {
        Cost {
            cpu_ns: later.cpu_ns - self.cpu_ns,
            wall_ns: u64::try_from((later.at - self.at).as_nanos()).unwrap_or(u64::MAX),
            minor_faults: later.minor_faults - self.minor_faults,
            ..Cost::default()
        }
    }
}

fn field(text: &str, at: usize) -> Result<u64> {
    let word = text.split_whitespace().nth(at);
    let word = word.with_context(|| format!("no field {at} in {text:?}"))?;
    Ok(word.parse()?)
}

/// One line of the report.
pub(crate) fn medians(costs: &[Cost]) -> String {
    let of =
        |value: &dyn Fn(&Cost) -> Option<u64>| median(costs.iter().filter_map(value).collect());
    let count = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
    let ms = |ns: Option<u64>| {
        let hundredths = ns.map(|ns| ns / 10_000);
        hundredths.map_or("-".to_owned(), |n| format!("{}.{:02}", n / 100, n % 100))
    };
    // Shadow entries come from traced lives, all other counters from untraced ones.
    format!(
        "CPU {:>6}  wall {:>6}  host {:>5}  own {:>5}  shadow {:>5}",
        ms(of(&|cost| cost.shadow.is_none().then_some(cost.cpu_ns))),
        ms(of(&|cost| cost.shadow.is_none().then_some(cost.wall_ns))),
        count(of(&|cost| Some(cost.minor_faults))),
        count(of(&|cost| cost.own_pages)),
        count(of(&|cost| cost.shadow)),
    )
}

/// The median by nearest rank; `None` without values.
fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}
