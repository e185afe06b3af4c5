//! Admission of starts, and decisions on fills, as pure functions: numbers in, an action out. Nothing here reads a
//! clock or a file.
//!
//! Memory is admitted by measurement ([`need`]). A sandbox is expected to need as much memory as was measured for most
//! sandboxes of its template at its age or later. What it lacks to that size is promised to it, together with a margin
//! for all and with the largest growth of one sandbox that was seen lately. If a few sandboxes grow much larger than the
//! others, the host has less available memory, but the expectation for other sandboxes barely changes. Guests may grow
//! to all of their RAM, and the sum of their RAM may exceed the host's memory: [`pressure`] then defends the host.
//!
//! A start holds a place while its VM is made. The number of places limits concurrent starts. A start whose guest is
//! unresponsive holds its place until its timeout, so starts that anyone may cause can never hold all places
//! ([`Places`]).
//!
//! Disk space is admitted by current free space. A new sandbox needs an initial share for its layer. A save needs the
//! maximum that it may write. Layers may later outgrow the disk. While only the reserve is left, new sandboxes and
//! saves are refused, but paused sandboxes may still be resumed.

mod callers;
mod creates;
mod need;
mod places;
mod pressure;
mod share;
#[cfg(test)]
mod simulation;

use std::time::Duration;

use crate::config::WarmMarks;

pub(crate) use callers::Callers;
pub(crate) use creates::Creates;
pub(crate) use need::{Estimate, KERNEL, Need, Sizes, UNKNOWN};
pub(crate) use places::{Places, StartFor};
pub(crate) use pressure::{Decision, HostMemory, Marks, Pressure, Step, defend};
pub(crate) use share::{Budget, Claim, Held, Lack, Supplied, divide, supply_first};

/// The host's resources for sandboxes, and how much of them is set aside. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// MemAvailable.
    pub(crate) available: u64,
    /// Memory that is never given to sandboxes.
    pub(crate) reserve: u64,
    /// Above `Calm`, nothing is admitted.
    pub(crate) pressure: Pressure,
    /// Memory that one sandbox is expected to need, with its part of the margin.
    pub(crate) expected: u64,
    /// The part of `expected` that a warm slot already has.
    pub(crate) warm_has: u64,
    /// Memory that existing slots are expected to take in addition to what they have, with the margin.
    pub(crate) promised: u64,
    /// Variance of the sum of what they are expected to need, and the number of standard deviations in the margin.
    pub(crate) variance: u128,
    pub(crate) margin: u32,
    /// Slots that have a VM or are about to.
    pub(crate) slots: u32,
    /// Limit on `slots`.
    pub(crate) max: u32,
    /// The disk of the layers.
    pub(crate) disk: Space,
    /// Disk space that one sandbox is expected to need for its layer.
    pub(crate) layer: u64,
}

/// A disk's space for sandboxes, and how much of it is set aside. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Space {
    /// Free for unprivileged processes.
    pub(crate) available: u64,
    /// Space that is never given to sandboxes.
    pub(crate) reserve: u64,
    /// Space that sandboxes and saves under way are expected to write.
    pub(crate) promised: u64,
}

impl Space {
    pub(crate) fn free(&self) -> u64 {
        self.available
            .saturating_sub(self.reserve)
            .saturating_sub(self.promised)
    }

    /// Returns the shortage if `need` more bytes do not fit; `None` if they do.
    pub(crate) fn short_of(&self, need: u64) -> Option<Short> {
        let free = self.free();
        (need > free).then_some(Short::Disk { need, free })
    }

    /// Whether less than the reserve is left.
    pub(crate) fn is_low(&self) -> bool {
        self.available < self.reserve
    }
}

impl Room {
    /// The same host, for a sandbox with this need.
    pub(crate) fn of(self, need: Need) -> Self {
        let both = margin(self.margin, self.variance.saturating_add(need.variance));
        let more = both.saturating_sub(margin(self.margin, self.variance));
        Self {
            expected: need.expected.saturating_add(more),
            warm_has: need.warm_has,
            ..self
        }
    }

    pub(crate) fn free(&self) -> u64 {
        self.available
            .saturating_sub(self.reserve)
            .saturating_sub(self.promised)
    }

    /// Memory beyond what is set aside, in bytes. Negative if sandboxes may lack memory.
    pub(crate) fn surplus(&self) -> i128 {
        i128::from(self.available) - i128::from(self.reserve) - i128::from(self.promised)
    }

    /// Whether there is room for a fill. Requires room for two, so that a fill is never the reason for refusing the next
    /// create.
    pub(crate) fn fits_fill(&self) -> bool {
        self.pressure == Pressure::Calm
            && self.free() >= self.expected.saturating_mul(2)
            && self.disk.free() >= self.layer.saturating_mul(2)
            && self.slots < self.max
    }

    /// Returns the shortage of memory or slots for one more sandbox; `None` if it fits.
    fn short_of(&self, start: Start) -> Option<Short> {
        if self.pressure != Pressure::Calm {
            let left = self.available;
            return Some(Short::Pressure { left });
        }
        let need = match start {
            Start::Warm => self.expected.saturating_sub(self.warm_has),
            Start::Cold => self.expected,
        };
        if start == Start::Cold && self.slots >= self.max {
            return Some(Short::Slots { max: self.max });
        }
        (need > self.free()).then_some(Short::Memory {
            need,
            free: self.free(),
        })
    }
}

/// This many standard deviations, in bytes.
pub(crate) fn margin(count: u32, variance: u128) -> u64 {
    u64::try_from(variance.isqrt())
        .unwrap_or(u64::MAX)
        .saturating_mul(u64::from(count))
}

/// Whether a template that was last used at `used_ns` is no longer in use.
pub(crate) fn is_idle(used_ns: u64, now_ns: u64, idle: Duration) -> bool {
    Duration::from_nanos(now_ns.saturating_sub(used_ns)) >= idle
}

/// The two ways in which a sandbox starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// From a warm slot.
    Warm,
    /// With a new VM.
    Cold,
}

/// The resource that is short. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    Memory {
        need: u64,
        free: u64,
    },
    Disk {
        need: u64,
        free: u64,
    },
    /// All configured slots are in use.
    Slots {
        max: u32,
    },
    /// Running sandboxes have taken the memory that is kept free for their growth. `left` is MemAvailable.
    Pressure {
        left: u64,
    },
}

/// How long traffic to a paused sandbox waits for room on a full host, and any start on a host under [`Pressure`].
const ROOM_WAIT: Duration = Duration::from_secs(5);
/// Maximum number of starts that wait for room at a time. Limited, because anyone who can reach a port may cause them.
const MAX_AWAITING: usize = 64;

/// Whether a start waits for room instead of being refused. `waited` is the time since the request, `others` the number
/// of starts that wait for room. A shortage of disk space is not waited for, because it does not end within seconds.
pub(crate) fn may_wait(short: Short, start: StartFor, waited: Duration, others: usize) -> bool {
    let waits = match short {
        Short::Disk { .. } => false,
        Short::Memory { .. } | Short::Slots { .. } => start == StartFor::Wake,
        Short::Pressure { .. } => true,
    };
    waits && waited < ROOM_WAIT && others < MAX_AWAITING
}

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory { need, free } => write!(
                f,
                "one more needs {} MiB, but only {} MiB are free for sandboxes",
                need >> 20,
                free >> 20
            ),
            Self::Disk { need, free } => write!(
                f,
                "{} MiB may be needed, but only {} MiB are free beyond the reserve and the space set aside",
                need.div_ceil(1 << 20),
                free >> 20
            ),
            Self::Slots { max } => write!(f, "{max} sandboxes are running, which is the limit"),
            Self::Pressure { left } => write!(
                f,
                "the host is short of memory ({} MiB left), because running sandboxes need more than expected: \
                 sandboxes start again when some have ended or have freed memory",
                left >> 20
            ),
        }
    }
}

/// A request for a start, and what could serve it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// A warm slot of its template can serve it.
    pub(crate) warm: bool,
    /// The start is a resume, whose layer is already on disk.
    pub(crate) has_layer: bool,
    /// A warm slot, of any template, could be ended.
    pub(crate) other_warm: bool,
    /// Some slot is ending, and its VM will free its memory.
    pub(crate) ending: bool,
    /// A place for its start is free.
    pub(crate) place: bool,
}

/// The decision on a request for a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// It takes a warm slot.
    Take,
    /// A VM is made for it.
    Start,
    /// It must wait for an ending slot or for a place.
    Wait,
    /// A warm slot must be ended, and the request waits for its memory or slot.
    Evict,
    Refuse(Short),
}

/// Decides how a sandbox is started, or that its start must wait or is refused.
pub(crate) fn place(room: &Room, demand: &Demand) -> Placement {
    let start = if demand.warm {
        Start::Warm
    } else {
        Start::Cold
    };
    let layer = if demand.has_layer { 0 } else { room.layer };
    match room.short_of(start).or_else(|| room.disk.short_of(layer)) {
        Some(_) if demand.ending => Placement::Wait,
        // Evicting a warm slot would not help, because it frees almost no disk space.
        Some(short @ Short::Disk { .. }) => Placement::Refuse(short),
        Some(_) if demand.other_warm => Placement::Evict,
        Some(short) => Placement::Refuse(short),
        None if demand.warm => Placement::Take,
        None if !demand.place => Placement::Wait,
        None => Placement::Start,
    }
}

/// How long a refused caller should wait before it tries again, so that sandboxes have time to end.
pub(crate) fn retry_after(short: Short) -> Duration {
    match short {
        Short::Memory { .. } | Short::Disk { .. } | Short::Pressure { .. } => {
            Duration::from_secs(5)
        }
        Short::Slots { .. } => Duration::from_secs(2),
    }
}

/// The warm stock of one template.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stock {
    pub(crate) warm: u32,
    pub(crate) filling: u32,
    pub(crate) low: u32,
    pub(crate) high: u32,
    /// The stock has fallen below the low mark, and has not reached the high mark since then.
    pub(crate) refilling: bool,
}

/// The marks of a template, given its configured marks, demand and share of the budget.
pub(crate) fn marks(floor: WarmMarks, wanted: u32, share: u32) -> WarmMarks {
    WarmMarks {
        low: floor.low.max(wanted).min(share),
        high: share,
    }
}

/// Whether a template's stock must be refilled.
pub(crate) fn refilling(stock: &Stock) -> bool {
    let have = stock.warm + stock.filling;
    have < stock.high && (stock.refilling || have < stock.low)
}

/// The load that requests of callers put on the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreground {
    /// Whether a caller is waiting.
    pub(crate) waiting: bool,
    /// How long the first work of the callers is expected to last ([`Callers`]).
    pub(crate) busy_for: Duration,
    /// Time since the last fill began.
    pub(crate) since_fill: Duration,
    /// Fills under way.
    pub(crate) filling: u32,
    /// Limit on `filling`.
    pub(crate) max_filling: u32,
}

/// Interval between fills while callers keep the pool busy.
pub(crate) const STARVED: Duration = Duration::from_millis(1000);

/// Whether a fill may begin, if there is room for it.
pub(crate) fn may_fill(foreground: &Foreground) -> bool {
    let calm = !foreground.waiting && foreground.busy_for.is_zero();
    let turn = calm || (foreground.since_fill >= STARVED && foreground.filling == 0);
    turn && foreground.filling < foreground.max_filling
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(available: u64, slots: u32) -> Room {
        Room {
            available: available * MIB,
            reserve: 500 * MIB,
            expected: 20 * MIB,
            warm_has: 8 * MIB,
            slots,
            max: 10,
            disk: disk(1000),
            layer: 32 * MIB,
            ..Room::default()
        }
    }

    fn disk(available: u64) -> Space {
        Space {
            available: available * MIB,
            reserve: 100 * MIB,
            promised: 50 * MIB,
        }
    }

    const COLD: Demand = Demand {
        warm: false,
        has_layer: false,
        other_warm: false,
        ending: false,
        place: true,
    };

    #[test]
    fn warm_slots_are_taken_and_evicted() {
        let warm = Demand { warm: true, ..COLD };
        let other = Demand {
            other_warm: true,
            ..COLD
        };
        assert_eq!(place(&room(1000, 3), &warm), Placement::Take);
        // A warm slot is already counted and needs only the rest.
        assert_eq!(place(&room(512, 10), &warm), Placement::Take);
        assert_eq!(place(&room(1000, 3), &COLD), Placement::Start);
        assert_eq!(
            place(&room(1000, 10), &COLD),
            Placement::Refuse(Short::Slots { max: 10 })
        );
        assert_eq!(place(&room(1000, 10), &other), Placement::Evict);
        assert_eq!(place(&room(512, 3), &other), Placement::Evict);
        let short = Short::Memory {
            need: 20 * MIB,
            free: 12 * MIB,
        };
        assert_eq!(place(&room(512, 3), &COLD), Placement::Refuse(short));
        let ending = Demand {
            ending: true,
            ..COLD
        };
        assert_eq!(place(&room(512, 3), &ending), Placement::Wait);
        let busy = Demand {
            place: false,
            ..COLD
        };
        assert_eq!(place(&room(1000, 3), &busy), Placement::Wait);
    }

    #[test]
    fn a_disk_at_its_reserve_admits_nothing_new() {
        let low = Room {
            disk: disk(181),
            ..room(1000, 3)
        };
        let short = Short::Disk {
            need: 32 * MIB,
            free: 31 * MIB,
        };
        let full = Placement::Refuse(short);
        assert_eq!(place(&low, &COLD), full);
        // Not even from the warm stock, because ending warm slots frees no space.
        let warm = Demand {
            warm: true,
            other_warm: true,
            ..COLD
        };
        assert_eq!(place(&low, &warm), full);
        // A paused sandbox may be resumed: its user may want to delete files.
        let back = Demand {
            has_layer: true,
            ..COLD
        };
        assert_eq!(place(&low, &back), Placement::Start);
        let ending = Demand {
            ending: true,
            ..COLD
        };
        assert_eq!(place(&low, &ending), Placement::Wait);
        assert_eq!(low.disk.short_of(31 * MIB), None);
        assert!(!low.disk.is_low() && disk(99).is_low());
        assert_eq!(disk(99).free(), 0);
        let text = short.to_string();
        assert_eq!(
            text,
            "32 MiB may be needed, but only 31 MiB are free beyond the reserve and the space set aside"
        );
    }

    #[test]
    fn filling_begins_below_the_low_mark_and_ends_at_the_high_mark() {
        let stock = |warm, refilling| Stock {
            warm,
            filling: 0,
            low: 2,
            high: 4,
            refilling,
        };
        assert!(refilling(&stock(1, false)));
        assert!(!refilling(&stock(2, false)));
        assert!(refilling(&stock(2, true)));
        assert!(!refilling(&stock(4, true)));
    }

    #[test]
    fn marks_are_at_least_the_configured_ones_within_the_share() {
        let floor = WarmMarks { low: 2, high: 4 };
        let of = |wanted, share| {
            let marks = marks(floor, wanted, share);
            (marks.low, marks.high)
        };
        assert_eq!([of(0, 4), of(3, 4), of(9, 9)], [(2, 4), (3, 4), (9, 9)]);
        assert_eq!([of(9, 5), of(0, 1)], [(5, 5), (1, 1)], "a small budget");
    }

    #[test]
    fn filling_yields_to_callers_but_does_not_starve() {
        let calm = Foreground {
            waiting: false,
            busy_for: Duration::ZERO,
            since_fill: Duration::ZERO,
            filling: 0,
            max_filling: 2,
        };
        assert!(may_fill(&calm));
        let busy = Foreground {
            waiting: true,
            ..calm
        };
        assert!(!may_fill(&busy));
        let working = Foreground {
            busy_for: Duration::from_millis(1),
            ..calm
        };
        assert!(!may_fill(&working));
        let starved = Foreground {
            since_fill: STARVED,
            ..busy
        };
        assert!(may_fill(&starved));
        let full = Foreground { filling: 2, ..calm };
        assert!(!may_fill(&full));
    }

    #[test]
    fn resumes_by_traffic_wait_for_memory_and_slots_for_a_while() {
        let slots = Short::Slots { max: 1 };
        let memory = Short::Memory { need: 2, free: 1 };
        let early = ROOM_WAIT - Duration::from_millis(1);
        let wake = |short, waited, others| may_wait(short, StartFor::Wake, waited, others);
        for short in [slots, memory] {
            assert!(wake(short, early, MAX_AWAITING - 1));
            assert!(!wake(short, ROOM_WAIT, 0));
            assert!(!wake(short, Duration::ZERO, MAX_AWAITING));
            assert!(!may_wait(short, StartFor::Create, early, 0));
        }
        assert!(!wake(Short::Disk { need: 2, free: 1 }, early, 0));
    }

    #[test]
    fn under_pressure_warm_slots_end_first_and_then_every_start_waits_for_a_while() {
        let tight = Room {
            pressure: Pressure::Tight,
            ..room(1000, 3)
        };
        let warm = Demand {
            warm: true,
            other_warm: true,
            ..COLD
        };
        assert_eq!(place(&tight, &warm), Placement::Evict);
        let short = Short::Pressure { left: 1000 * MIB };
        assert_eq!(place(&tight, &COLD), Placement::Refuse(short));
        assert!(!tight.fits_fill());
        assert!(may_wait(short, StartFor::Create, Duration::ZERO, 0));
        assert!(!may_wait(short, StartFor::Create, ROOM_WAIT, 0));
        assert!(!may_wait(
            short,
            StartFor::Create,
            Duration::ZERO,
            MAX_AWAITING
        ));
        assert!(
            short
                .to_string()
                .contains("short of memory (1000 MiB left)")
        );
    }

    #[test]
    fn one_of_many_adds_little_to_the_margin() {
        let need = Need {
            expected: 4 * MIB,
            variance: u128::from(4 * MIB).pow(2),
            warm_has: 0,
        };
        let of = |others: u128| {
            let room = Room {
                variance: need.variance * others,
                margin: 3,
                ..Room::default()
            };
            room.of(need).expected
        };
        assert_eq!(of(0), 16 * MIB);
        assert!(of(1000) < 4 * MIB + MIB / 4, "{}", of(1000));
    }

    #[test]
    fn a_fill_needs_room_for_two() {
        assert!(room(1000, 3).fits_fill());
        assert!(!room(530, 3).fits_fill());
        assert!(!room(1000, 10).fits_fill());
        let low = Room {
            disk: disk(200),
            ..room(1000, 3)
        };
        assert!(!low.fits_fill());
    }

    proptest! {
        #[test]
        fn only_what_fits_is_admitted(
            available in 0..4000_u64,
            promised in 0..2000_u64,
            slots in 0..12_u32,
            warm: bool,
            other_warm: bool,
            ending: bool,
            free_place: bool,
            disk_mib in 0..400_u64,
            has_layer: bool,
        ) {
            let room = Room { promised: promised * MIB, ..room(available, slots) };
            let room = Room { disk: disk(disk_mib), ..room };
            let disk_left = room.disk.free();
            let demand = Demand { warm, has_layer, other_warm, ending, place: free_place };
            let left = room.available.saturating_sub(room.reserve + room.promised);
            match place(&room, &demand) {
                Placement::Take => {
                    prop_assert!(warm && left >= room.expected - room.warm_has);
                    prop_assert!(has_layer || disk_left >= room.layer);
                }
                Placement::Start => {
                    prop_assert!(has_layer || disk_left >= room.layer);
                    prop_assert!(!warm && left >= room.expected);
                    prop_assert!(slots < room.max && free_place);
                }
                Placement::Evict => prop_assert!(other_warm),
                Placement::Wait => prop_assert!(ending || !free_place),
                Placement::Refuse(Short::Disk { .. }) => prop_assert!(!ending && !has_layer),
                Placement::Refuse(_) => prop_assert!(!ending && !other_warm),
            }
        }
    }
}
