//! Plans of episodes. A plan is a function of the seed and the number of the episode. It does not depend on
//! responses or clocks, so a shortened plan can be played again.

use std::{fmt, ops::RangeInclusive};

use serde::Serialize;
use stats::random::SplitMix64;

/// Clients of an episode. Each performs its steps in order.
pub(super) const CLIENTS: u8 = 4;
/// Steps of an episode.
const STEPS: usize = 48;
/// Number of sandboxes that a plan keeps at the same time, as far as it can foresee.
const MOST: usize = 5;
/// One in this many steps acts on an ended sandbox, which must stay ended.
const OF_THE_DEAD: usize = 12;
/// One in this many creates is from a snapshot, if there is one, and pauses at its deadline.
const FROM_A_SNAPSHOT: usize = 3;
const PAUSING: usize = 4;

/// A sandbox of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(super) struct Handle(pub(super) usize);

/// A snapshot of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(super) struct Image(pub(super) usize);

/// Where a sandbox keeps a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Place {
    /// A file on the disk.
    Disk,
    /// The memory of a process.
    Memory,
}

/// State that a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Keep {
    All,
    Disk,
}

/// Behaviour of a sandbox at its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AtDeadline {
    End,
    Pause,
}

/// An operation on one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
    /// Run a command and compare its output.
    Exec,
    Write(Place, u32),
    Read(Place),
    Pause(Keep),
    Connect,
    Resume,
    Snapshot(Image),
    Fork(Handle),
    /// Move the deadline far away.
    Extend,
    /// Set the deadline to a second from now, and wait for it to pass.
    Expire,
    /// The deadline passes. Never planned: it follows `Expire`.
    Deadline,
    Kill,
    /// Get the state, individually or from a list.
    Look,
    /// SIGKILL of the VMM.
    KillVmm,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Op {
    Create {
        to: Handle,
        from: Option<Image>,
        at_deadline: AtDeadline,
    },
    On(Handle, Action),
    List,
    /// SIGKILL of the server and a restart. With `twice`, the new server is killed during its start.
    KillServer {
        twice: bool,
    },
}

/// A step: an operation of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Step {
    /// Its number in the whole plan.
    pub(super) number: usize,
    pub(super) client: u8,
    pub(super) op: Op,
}

/// Whether the suite can kill processes of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kills {
    ServerAndVmms,
    Nothing,
}

/// Expected state of a sandbox in the plan. Actual responses may differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Running,
    Paused,
    Ended,
}

struct Planner {
    random: SplitMix64,
    sandboxes: Vec<Expected>,
    images: usize,
    value: u32,
}

/// The steps of an episode.
pub(super) fn episode(seed: u64, number: u64, kills: Kills) -> Vec<Step> {
    let mut planner = Planner {
        random: SplitMix64::new(seed.wrapping_mul(1_000_003).wrapping_add(number)),
        sandboxes: Vec::new(),
        images: 0,
        value: 0,
    };
    let step = |number| Step {
        number,
        client: u8::try_from(planner.random.below(usize::from(CLIENTS))).unwrap_or(0),
        op: planner.op(kills),
    };
    (0..STEPS).map(step).collect()
}

impl Planner {
    fn op(&mut self, kills: Kills) -> Op {
        let alive = self.with(|expected| expected != Expected::Ended);
        let roll = self.random.below(100);
        match roll {
            0..=1 if kills == Kills::ServerAndVmms => Op::KillServer {
                twice: self.random.below(3) == 0,
            },
            2..=5 if !alive.is_empty() => Op::List,
            6..=16 if alive.len() < MOST => self.create(),
            _ if alive.is_empty() => self.create(),
            _ => self.on_one(&alive, kills),
        }
    }

    fn with(&self, wanted: impl Fn(Expected) -> bool) -> Vec<usize> {
        let all = self.sandboxes.iter().enumerate();
        let chosen = all.filter(|(_, expected)| wanted(**expected));
        chosen.map(|(at, _)| at).collect()
    }

    fn born(&mut self) -> Handle {
        self.sandboxes.push(Expected::Running);
        Handle(self.sandboxes.len() - 1)
    }

    fn create(&mut self) -> Op {
        let from = match self.images {
            0 => None,
            count if self.random.below(FROM_A_SNAPSHOT) == 0 => {
                Some(Image(self.random.below(count)))
            }
            _ => None,
        };
        let at_deadline = match self.random.below(PAUSING) {
            0 => AtDeadline::Pause,
            _ => AtDeadline::End,
        };
        Op::Create {
            to: self.born(),
            from,
            at_deadline,
        }
    }

    fn on_one(&mut self, alive: &[usize], kills: Kills) -> Op {
        let ended = self.with(|expected| expected == Expected::Ended);
        let of_the_dead = !ended.is_empty() && self.random.below(OF_THE_DEAD) == 0;
        let among = if of_the_dead { &ended } else { alive };
        let at = among[self.random.below(among.len())];
        let action = match self.sandboxes[at] {
            Expected::Paused => self.on_paused(),
            Expected::Running | Expected::Ended => self.on_running(alive.len(), kills),
        };
        self.foresee(at, action);
        Op::On(Handle(at), action)
    }

    fn on_running(&mut self, alive: usize, kills: Kills) -> Action {
        match self.random.below(100) {
            0..=31 => self.write(),
            32..=51 => Action::Read(self.place()),
            52..=57 => Action::Exec,
            58..=64 => Action::Pause(Keep::All),
            65..=67 => Action::Pause(Keep::Disk),
            68..=72 => self.snapshot(),
            73..=79 if alive < MOST => Action::Fork(self.born()),
            73..=80 => Action::Look,
            81..=84 => Action::Connect,
            85..=86 => Action::Resume,
            87..=89 => Action::Extend,
            90..=92 => Action::Expire,
            93..=95 if kills == Kills::ServerAndVmms => Action::KillVmm,
            _ => Action::Kill,
        }
    }

    fn on_paused(&mut self) -> Action {
        match self.random.below(100) {
            0..=44 => Action::Connect,
            45..=59 => Action::Resume,
            60..=69 => self.snapshot(),
            70..=76 => Action::Read(self.place()),
            77..=80 => self.write(),
            81..=85 => Action::Pause(Keep::All),
            86..=88 => Action::Extend,
            89..=93 => Action::Look,
            _ => Action::Kill,
        }
    }

    fn write(&mut self) -> Action {
        self.value += 1;
        Action::Write(self.place(), self.value)
    }

    fn place(&mut self) -> Place {
        match self.random.below(2) {
            0 => Place::Disk,
            _ => Place::Memory,
        }
    }

    fn snapshot(&mut self) -> Action {
        self.images += 1;
        Action::Snapshot(Image(self.images - 1))
    }

    fn foresee(&mut self, at: usize, action: Action) {
        self.sandboxes[at] = match (self.sandboxes[at], action) {
            (Expected::Ended, _) => Expected::Ended,
            (_, Action::Kill | Action::Expire) => Expected::Ended,
            (Expected::Running, Action::KillVmm) => Expected::Ended,
            (_, Action::Pause(_)) => Expected::Paused,
            (_, Action::Connect | Action::Resume) => Expected::Running,
            (expected, _) => expected,
        };
    }
}

/// The numbers of steps as text, such as `0,3-5`.
pub(super) fn numbers(steps: &[Step]) -> String {
    let mut ranges: Vec<RangeInclusive<usize>> = Vec::new();
    for step in steps {
        match ranges.last_mut() {
            Some(last) if *last.end() + 1 == step.number => {
                *last = *last.start()..=step.number;
            }
            _ => ranges.push(step.number..=step.number),
        }
    }
    let text = ranges
        .iter()
        .map(|range| match (range.start(), range.end()) {
            (start, end) if start == end => start.to_string(),
            (start, end) => format!("{start}-{end}"),
        });
    text.collect::<Vec<_>>().join(",")
}

/// Some steps of a plan, as [`numbers`] prints them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection(Vec<RangeInclusive<usize>>);

impl std::str::FromStr for Selection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = |part: &str| {
            let (start, end) = part.split_once('-').unwrap_or((part, part));
            Some(start.parse().ok()?..=end.parse().ok()?)
        };
        let ranges = text.split(',').map(range).collect::<Option<_>>();
        let ranges = ranges.ok_or("use numbers and ranges of steps, such as 0,3-5")?;
        Ok(Self(ranges))
    }
}

impl Selection {
    /// The selected steps, in their order.
    pub(super) fn of(&self, steps: Vec<Step>) -> Vec<Step> {
        let is_chosen = |step: &Step| self.0.iter().any(|range| range.contains(&step.number));
        steps.into_iter().filter(is_chosen).collect()
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sandbox {}", self.0)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exec => f.write_str("run a command"),
            Self::Write(place, value) => write!(f, "write {value} to the {place}"),
            Self::Read(place) => write!(f, "read the value in the {place}"),
            Self::Pause(Keep::All) => f.write_str("pause"),
            Self::Pause(Keep::Disk) => f.write_str("pause without memory"),
            Self::Connect => f.write_str("connect"),
            Self::Resume => f.write_str("resume"),
            Self::Snapshot(image) => write!(f, "make snapshot {}", image.0),
            Self::Fork(to) => write!(f, "fork to {to}"),
            Self::Extend => f.write_str("extend the timeout"),
            Self::Expire => f.write_str("set a timeout of 1 s and wait for its end"),
            Self::Deadline => f.write_str("the deadline passes"),
            Self::Kill => f.write_str("kill"),
            Self::Look => f.write_str("look up"),
            Self::KillVmm => f.write_str("SIGKILL of the VMM"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>3}  client {}: ", self.number, self.client)?;
        match self.op {
            Op::Create { to, from, .. } => {
                write!(f, "create {to}")?;
                if let Some(image) = from {
                    write!(f, " from snapshot {}", image.0)?;
                }
                Ok(())
            }
            Op::On(handle, action) => write!(f, "{handle}: {action}"),
            Op::List => f.write_str("list all sandboxes"),
            Op::KillServer { twice: false } => f.write_str("SIGKILL of the server"),
            Op::KillServer { twice: true } => {
                f.write_str("SIGKILL of the server, and again during its start")
            }
        }
    }
}
