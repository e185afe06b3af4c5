//! Admission and fills as pure functions: numbers in, an action out. Nothing here reads a clock or a file.
//!
//! Memory is admitted by measurement. A sandbox is expected to need what most leased sandboxes of its template were
//! measured to have (never less than a floor); for one that has not grown to that size, the difference is promised. A
//! sandbox that takes more reduces the host's available memory and does not change the expectation for others. Guests
//! may grow to all of their RAM, and the sum may exceed the host's memory; the cgroup around the pool limits them then.
//!
//! A start holds a place while its VM is made, and there are as many places as the host can use at once. A start whose
//! guest does not answer holds its place until its timeout, so starts that anyone may cause never hold all places
//! ([`Places`]).
//!
//! Disk space is admitted by what is free now: a new sandbox needs a first share for its layer, a save what it may
//! write at most. Layers, too, may grow to more than the disk has; below the reserve nothing new begins.

mod need;
mod places;

use std::time::Duration;

pub(crate) use need::Need;
pub(crate) use places::{Places, StartFor};

/// The host's resources for sandboxes and how much of them is promised. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// MemAvailable.
    pub(crate) available: u64,
    /// Memory that is never given to sandboxes.
    pub(crate) reserve: u64,
    /// Memory that one sandbox is expected to need.
    pub(crate) expected: u64,
    /// The part of `expected` that a warm slot already has.
    pub(crate) warm_has: u64,
    /// Memory that the present slots are expected to take beyond what they have.
    pub(crate) promised: u64,
    /// Slots that have a VM or are about to.
    pub(crate) slots: u32,
    /// Limit of `slots`.
    pub(crate) max: u32,
    /// The disk of the layers.
    pub(crate) disk: Space,
    /// Disk space that one sandbox is expected to need for its layer.
    pub(crate) layer: u64,
}

/// A disk's space for sandboxes and how much of it is promised. Sizes in bytes.
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

    /// The shortage if `need` more bytes are to be written; `None` if they fit.
    pub(crate) fn short_of(&self, need: u64) -> Option<Short> {
        let free = self.free();
        (need > free).then_some(Short::Disk { need, free })
    }

    /// Whether only the reserve is left.
    pub(crate) fn is_low(&self) -> bool {
        self.available < self.reserve
    }
}

impl Room {
    fn free(&self) -> u64 {
        self.available
            .saturating_sub(self.reserve)
            .saturating_sub(self.promised)
    }

    /// The shortage for one more sandbox; `None` if it fits.
    fn short_of(&self, start: Start) -> Option<Short> {
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

/// How a sandbox would start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// From a warm slot.
    Warm,
    /// With a VM that is made for it.
    Cold,
}

/// The resource that is short. Sizes in bytes.
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
    /// The configured number of sandboxes.
    Slots {
        max: u32,
    },
}

impl std::fmt::Display for Short {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory { need, free } => write!(
                f,
                "one more needs {} MiB, and {} MiB are free for sandboxes",
                need >> 20,
                free >> 20
            ),
            Self::Disk { need, free } => write!(
                f,
                "{} MiB may be needed, and {} MiB are free beyond the reserve and what is promised",
                need.div_ceil(1 << 20),
                free >> 20
            ),
            Self::Slots { max } => write!(f, "{max} sandboxes run, which is the limit"),
        }
    }
}

/// A request for a start, and what could serve it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// A slot of its template is warm.
    pub(crate) warm: bool,
    /// The sandbox is paused: its layer is on disk already.
    pub(crate) has_layer: bool,
    /// A warm slot, of any template, could be ended.
    pub(crate) other_warm: bool,
    /// A slot is ending and will give its memory back.
    pub(crate) ending: bool,
    /// A place for its start is free.
    pub(crate) place: bool,
}

/// The answer to a request for a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// It takes a warm slot.
    Take,
    /// A VM is made for it.
    Start,
    /// It waits for an ending slot or for a place.
    Wait,
    /// A warm slot is ended, and the request waits for its memory.
    Evict,
    Refuse(Short),
}

/// Decides where a sandbox comes from.
pub(crate) fn place(room: &Room, demand: &Demand) -> Placement {
    let start = if demand.warm {
        Start::Warm
    } else {
        Start::Cold
    };
    let layer = if demand.has_layer { 0 } else { room.layer };
    match room.short_of(start).or_else(|| room.disk.short_of(layer)) {
        Some(_) if demand.ending => Placement::Wait,
        // Ending a warm slot would free next to no disk space.
        Some(short @ Short::Disk { .. }) => Placement::Refuse(short),
        Some(_) if demand.other_warm => Placement::Evict,
        Some(short) => Placement::Refuse(short),
        None if demand.warm => Placement::Take,
        None if !demand.place => Placement::Wait,
        None => Placement::Start,
    }
}

/// When a refused caller should try again: after sandboxes have had time to end.
pub(crate) fn retry_after(short: Short) -> Duration {
    match short {
        Short::Memory { .. } | Short::Disk { .. } => Duration::from_secs(5),
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
    /// The stock fell below the low mark and has not reached the high mark since.
    pub(crate) refilling: bool,
}

/// Whether a template's stock is to be refilled.
pub(crate) fn refilling(stock: &Stock) -> bool {
    let have = stock.warm + stock.filling;
    have < stock.high && (stock.refilling || have < stock.low)
}

/// How busy the pool is with callers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreground {
    /// A caller waits for a start, a pause, a resume or a snapshot.
    pub(crate) waiting: bool,
    /// Time since a caller last asked for a sandbox or got one.
    pub(crate) quiet_for: Duration,
    /// Time since the last fill began.
    pub(crate) since_fill: Duration,
    /// Fills under way.
    pub(crate) filling: u32,
    /// Limit of `filling`.
    pub(crate) max_filling: u32,
}

/// A burst of creates is over when none has come for this long. A create is followed by its first command, and a fill
/// takes as much CPU as several of these.
pub(crate) const QUIET: Duration = Duration::from_millis(300);
/// Interval of fills while callers never pause.
pub(crate) const STARVED: Duration = Duration::from_millis(1000);

/// Whether a fill may begin.
pub(crate) fn may_fill(room: &Room, foreground: &Foreground) -> bool {
    let calm = !foreground.waiting && foreground.quiet_for >= QUIET;
    let turn = calm || (foreground.since_fill >= STARVED && foreground.filling == 0);
    // Room for two: a fill must never be the reason that the next create is refused.
    let spare = room.free() >= room.expected.saturating_mul(2)
        && room.disk.free() >= room.layer.saturating_mul(2);
    turn && spare && foreground.filling < foreground.max_filling && room.slots < room.max
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
            promised: 0,
            slots,
            max: 10,
            disk: disk(1000),
            layer: 32 * MIB,
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
        // A warm slot is counted already and needs only the rest.
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
        // Not even from the stock; ending warm slots frees no space.
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
            "32 MiB may be needed, and 31 MiB are free beyond the reserve and what is promised"
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
    fn filling_yields_to_callers_but_does_not_starve() {
        let calm = Foreground {
            waiting: false,
            quiet_for: QUIET,
            since_fill: Duration::ZERO,
            filling: 0,
            max_filling: 2,
        };
        assert!(may_fill(&room(1000, 3), &calm));
        let busy = Foreground {
            waiting: true,
            ..calm
        };
        assert!(!may_fill(&room(1000, 3), &busy));
        let starved = Foreground {
            since_fill: STARVED,
            ..busy
        };
        assert!(may_fill(&room(1000, 3), &starved));
        assert!(!may_fill(&room(530, 3), &calm));
        assert!(!may_fill(&room(1000, 10), &calm));
        let low = Room {
            disk: disk(200),
            ..room(1000, 3)
        };
        assert!(!may_fill(&low, &calm));
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
