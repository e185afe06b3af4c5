//! Decisions, without a clock or a file of their own: numbers in, an action out.
//!
//! Memory is admitted by measurement: a sandbox is taken to need what most leased ones of its template were seen to
//! need (never less than a floor), and one that has not grown to that yet has the difference set aside. What one of
//! them takes beyond that is seen in what the host has left, and counts for nobody else. Guests may grow to all of
//! their RAM, which is more than the host has for all of them together; the control group around the pool is what
//! stops them then.
//!
//! Starts have places, as many at once as the host has use for. A start whose guest says nothing holds its place until
//! its time is over, so those that anybody may cause never hold all ([`Places`]).
//!
//! Disk is admitted by what is free now: a new sandbox needs a first share for its layer, a save what it may
//! write at most. Layers may grow to more than the disk has, too; below the reserve nothing new is begun.

mod need;
mod places;

use std::time::Duration;

pub(crate) use need::Need;
pub(crate) use places::{Places, StartFor};

/// What the host has for sandboxes, and what is promised of it already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// MemAvailable, bytes.
    pub(crate) available: u64,
    /// Of it, never given to sandboxes.
    pub(crate) reserve: u64,
    /// What one sandbox is taken to need in the end.
    pub(crate) expected: u64,
    /// What one warm slot has of it already.
    pub(crate) warm_has: u64,
    /// What leased sandboxes are expected to take beyond what they have.
    pub(crate) promised: u64,
    /// Slots that have a VM or are about to.
    pub(crate) slots: u32,
    /// At most so many of them.
    pub(crate) max: u32,
    /// The disk of the layers.
    pub(crate) disk: Space,
    /// What one sandbox is taken to need of it.
    pub(crate) layer: u64,
}

/// What a disk has for sandboxes, and what is promised of it already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Space {
    /// Free for processes without privileges, bytes.
    pub(crate) available: u64,
    /// Of it, never given to sandboxes.
    pub(crate) reserve: u64,
    /// What is expected to be written.
    pub(crate) promised: u64,
}

impl Space {
    pub(crate) fn free(&self) -> u64 {
        self.available
            .saturating_sub(self.reserve)
            .saturating_sub(self.promised)
    }

    /// What is short for so many bytes more; `None` if nothing is.
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

    /// What is short for one more sandbox of this kind; `None` if nothing is.
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

/// How a sandbox would come to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// From a slot that is warm.
    Warm,
    /// By a VM of its own.
    Cold,
}

/// What there is too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    /// Memory, in bytes.
    Memory { need: u64, free: u64 },
    /// Space on a disk, in bytes.
    Disk { need: u64, free: u64 },
    /// The configured number.
    Slots { max: u32 },
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

/// What one who wants a sandbox sees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// A slot of its template is warm.
    pub(crate) warm: bool,
    /// It has its layer already, on disk: it was paused.
    pub(crate) has_layer: bool,
    /// A slot of another template is warm and could give way.
    pub(crate) other_warm: bool,
    /// Something is ending at this moment and will give its memory back.
    pub(crate) ending: bool,
    /// There is a place for its start: more at once only make all of them late.
    pub(crate) place: bool,
}

/// What happens to one who wants a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Takes a warm slot.
    Take,
    /// Gets a VM of its own.
    Start,
    /// Waits for what is under way.
    Wait,
    /// Waits for a warm slot of another template to end.
    Evict,
    /// Is refused.
    Refuse(Short),
}

/// Where the next in line gets a sandbox from.
pub(crate) fn place(room: &Room, demand: &Demand) -> Placement {
    let start = if demand.warm {
        Start::Warm
    } else {
        Start::Cold
    };
    let layer = if demand.has_layer { 0 } else { room.layer };
    match room.short_of(start).or_else(|| room.disk.short_of(layer)) {
        Some(_) if demand.ending => Placement::Wait,
        // What waits has written next to nothing.
        Some(short @ Short::Disk { .. }) => Placement::Refuse(short),
        Some(_) if demand.other_warm => Placement::Evict,
        Some(short) => Placement::Refuse(short),
        None if demand.warm => Placement::Take,
        None if !demand.place => Placement::Wait,
        None => Placement::Start,
    }
}

/// When a refused caller should try again: soon if something is ending, else when sandboxes have had time to end.
pub(crate) fn retry_after(short: Short) -> Duration {
    match short {
        Short::Memory { .. } | Short::Disk { .. } => Duration::from_secs(5),
        Short::Slots { .. } => Duration::from_secs(2),
    }
}

/// Warm slots of one template.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stock {
    pub(crate) warm: u32,
    pub(crate) filling: u32,
    pub(crate) low: u32,
    pub(crate) high: u32,
    /// It fell below the low mark and has not reached the high one since.
    pub(crate) refilling: bool,
}

/// Whether a template is refilling after this look at its stock.
pub(crate) fn refilling(stock: &Stock) -> bool {
    let have = stock.warm + stock.filling;
    have < stock.high && (stock.refilling || have < stock.low)
}

/// How busy the pool is with people who wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreground {
    /// Somebody waits for a start, a pause or a resume.
    pub(crate) waiting: bool,
    /// Since somebody last did.
    pub(crate) quiet_for: Duration,
    /// Since the last fill was begun.
    pub(crate) since_fill: Duration,
    /// Fills that run now.
    pub(crate) filling: u32,
    /// At most so many at once.
    pub(crate) max_filling: u32,
}

/// A burst is over when nobody has come for so long. What comes right after a create is its first command, and
/// a fill takes as much CPU as several of those.
pub(crate) const QUIET: Duration = Duration::from_millis(300);
/// Under people who never stop coming, one fill is begun this often nevertheless.
pub(crate) const STARVED: Duration = Duration::from_millis(1000);

/// Whether a warm slot may be made now.
pub(crate) fn may_fill(room: &Room, foreground: &Foreground) -> bool {
    let calm = !foreground.waiting && foreground.quiet_for >= QUIET;
    let turn = calm || (foreground.since_fill >= STARVED && foreground.filling == 0);
    // One more than it needs: filling must never be what makes the next caller go away.
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

    const NOBODY: Demand = Demand {
        warm: false,
        has_layer: false,
        other_warm: false,
        ending: false,
        place: true,
    };

    #[test]
    fn warm_slots_are_taken_and_give_way() {
        let warm = Demand {
            warm: true,
            ..NOBODY
        };
        let other = Demand {
            other_warm: true,
            ..NOBODY
        };
        assert_eq!(place(&room(1000, 3), &warm), Placement::Take);
        // A warm slot is counted already, and needs only what it has not got.
        assert_eq!(place(&room(512, 10), &warm), Placement::Take);
        assert_eq!(place(&room(1000, 3), &NOBODY), Placement::Start);
        assert_eq!(
            place(&room(1000, 10), &NOBODY),
            Placement::Refuse(Short::Slots { max: 10 })
        );
        assert_eq!(place(&room(1000, 10), &other), Placement::Evict);
        assert_eq!(place(&room(512, 3), &other), Placement::Evict);
        let short = Short::Memory {
            need: 20 * MIB,
            free: 12 * MIB,
        };
        assert_eq!(place(&room(512, 3), &NOBODY), Placement::Refuse(short));
        let ending = Demand {
            ending: true,
            ..NOBODY
        };
        assert_eq!(place(&room(512, 3), &ending), Placement::Wait);
        let busy = Demand {
            place: false,
            ..NOBODY
        };
        assert_eq!(place(&room(1000, 3), &busy), Placement::Wait);
    }

    #[test]
    fn a_disk_down_to_its_reserve_begins_nothing_new() {
        let low = Room {
            disk: disk(181),
            ..room(1000, 3)
        };
        let short = Short::Disk {
            need: 32 * MIB,
            free: 31 * MIB,
        };
        let full = Placement::Refuse(short);
        assert_eq!(place(&low, &NOBODY), full);
        // Not even from the stock, and to end what waits gives nothing back.
        let warm = Demand {
            warm: true,
            other_warm: true,
            ..NOBODY
        };
        assert_eq!(place(&low, &warm), full);
        // One that was paused may come back: its caller may want to delete.
        let back = Demand {
            has_layer: true,
            ..NOBODY
        };
        assert_eq!(place(&low, &back), Placement::Start);
        let ending = Demand {
            ending: true,
            ..NOBODY
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
    fn filling_has_two_marks() {
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
    fn filling_yields_but_does_not_starve() {
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
        fn nothing_is_admitted_that_does_not_fit(
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
