//! The division of the warm stock's budget among templates.
//!
//! Slots are assigned one at a time, each to the template with the highest demand per slot: demand divided by the
//! number of slots including the next one. Shares are thus proportional to demands (as seats are in D'Hondt's method),
//! and a template gets its first slot before another gets one beyond its demand. Configured marks are served first, and
//! spare slots, for which there is no demand, last. Between equal claims, the template with more recent use goes first.
//! A template that already has the slot counts double, so that templates used in turn do not take each other's slots.
//!
//! Remaining memory holds loaded templates, in the same order. Templates that have slots by marks or demand precede
//! spare slots.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{Need, Room};

/// Limits of the warm stock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Warm slots and slots that are being filled.
    pub(crate) slots: u32,
    /// Private memory of these slots, and memory of templates in huge pages, in bytes.
    pub(crate) bytes: u64,
}

/// Resources that the warm stock uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) slots: u32,
    pub(crate) bytes: u64,
}

impl Budget {
    /// The budget while the host has `free` bytes for sandboxes in addition to the warm stock. Negative if sandboxes
    /// lack memory.
    pub(crate) fn within(self, held: Held, free: i128) -> Self {
        let bytes = i128::from(held.bytes).saturating_add(free).max(0);
        Self {
            bytes: self.bytes.min(u64::try_from(bytes).unwrap_or(u64::MAX)),
            ..self
        }
    }

    /// The budget that remains after `taken` bytes for other uses.
    pub(crate) fn beside(self, taken: u64) -> Self {
        let bytes = self.bytes.saturating_sub(taken);
        Self { bytes, ..self }
    }

    /// Selects what a template gets. A template whose memory does not fit gets slots that start from the disk.
    fn supply(&self, held: Held, lack: &Lack) -> Option<Supplied> {
        let fits = |bytes: u64| held.bytes.saturating_add(bytes) <= self.bytes;
        match lack.load_bytes {
            Some(bytes) if fits(bytes) => Some(Supplied::Memory),
            _ if held.slots < self.slots && fits(lack.slot_bytes) => Some(Supplied::Slot),
            _ => None,
        }
    }
}

/// A template that lacks a warm slot, and its requirements. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lack {
    /// Expected memory of its sandboxes.
    pub(crate) need: Need,
    /// Expected memory of a slot.
    pub(crate) slot_bytes: u64,
    /// The size of its memory, if it should be loaded first.
    pub(crate) load_bytes: Option<u64>,
}

/// The first of these templates for which both the host and the budget have room, and what it gets.
pub(crate) fn supply_first<T>(
    budget: Budget,
    held: Held,
    room: &Room,
    lacks: impl IntoIterator<Item = (T, Lack)>,
) -> Option<(T, Supplied)> {
    lacks.into_iter().find_map(|(template, lack)| {
        let supplied = budget.supply(held, &lack)?;
        room.of(lack.need)
            .fits_fill()
            .then_some((template, supplied))
    })
}

/// The next step for a template that lacks a warm slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Supplied {
    /// Its memory is loaded.
    Memory,
    /// A slot is filled.
    Slot,
}

/// The claim of one template on the budget. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Configured number of slots.
    pub(crate) floor: u32,
    /// Number of slots by demand; zero if the template is idle.
    pub(crate) wanted: u32,
    /// Number of slots while no other template's marks or demand need the room.
    pub(crate) spare: u32,
    /// Slots that it has or that are being filled.
    pub(crate) has: u32,
    /// Expected memory of a slot.
    pub(crate) slot_bytes: u64,
    /// Memory that loading the template takes. Zero if sandboxes still use a copy.
    pub(crate) load_bytes: u64,
    pub(crate) can_load: bool,
    pub(crate) is_loaded: bool,
    /// Recent use of the template.
    pub(crate) recent: u64,
    /// Last use of its memory, in CLOCK_MONOTONIC.
    pub(crate) used_ns: u64,
    /// Whether its memory is no longer in use.
    pub(crate) is_idle: bool,
}

/// The share of one template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) slots: u32,
    /// Whether its memory may be loaded.
    pub(crate) loads: bool,
}

impl Claim {
    /// Number of slots that it would get from an unlimited budget.
    pub(crate) fn most(&self) -> u32 {
        self.floor.max(self.wanted).max(self.spare)
    }

    /// Whether the template needs its memory: for warm slots, or because it is loaded and not idle.
    fn needs_memory(&self, share: Share) -> bool {
        self.can_load && (share.slots > 0 || self.is_loaded && !self.is_idle)
    }

    /// The order between equal claims. The larger one goes first. `has` tells whether the template already has what it
    /// claims.
    fn rank(&self, has: bool) -> (u64, u64) {
        let recent = if has {
            self.recent.saturating_mul(2)
        } else {
            self.recent
        };
        (recent, self.used_ns)
    }
}

/// Divides the budget. The result has the order of the claims, which also decides between equal claims.
pub(crate) fn divide(budget: Budget, claims: &[Claim]) -> Vec<Share> {
    let mut shares = vec![Share::default(); claims.len()];
    let mut left = budget;
    give_slots(&mut left, claims, &mut shares, |claim| claim.floor);
    give_slots(&mut left, claims, &mut shares, |claim| claim.wanted);
    give_memory(&mut left, claims, &mut shares, |share| share.slots > 0);
    give_slots(&mut left, claims, &mut shares, |claim| claim.spare);
    give_memory(&mut left, claims, &mut shares, |_| true);
    shares
}

/// Loads the memory of templates as long as there is room, the most used first.
fn give_memory(
    left: &mut Budget,
    claims: &[Claim],
    shares: &mut [Share],
    is_turn: impl Fn(&Share) -> bool,
) {
    let all = claims.iter().zip(shares);
    let mut lacking: Vec<_> = all
        .filter(|(_, share)| !share.loads && is_turn(share))
        .collect();
    lacking.sort_by_key(|(claim, _)| Reverse(claim.rank(claim.is_loaded)));
    for (claim, share) in lacking {
        if claim.needs_memory(*share) && claim.load_bytes <= left.bytes {
            left.bytes -= claim.load_bytes;
            share.loads = true;
        }
    }
}

/// Assigns slots until each template has as many as it demands, or the budget is exhausted. A template whose slot does
/// not fit into the memory gets no more.
fn give_slots(
    left: &mut Budget,
    claims: &[Claim],
    shares: &mut [Share],
    demand: impl Fn(&Claim) -> u32,
) {
    let bid = |at: usize, claim: &Claim, share: &Share| {
        let next = u64::from(share.slots) + 1;
        let value = (u64::from(demand(claim)) << 32) / next;
        let is_wanted = share.slots < demand(claim);
        let rank = claim.rank(u64::from(claim.has) >= next);
        is_wanted.then_some((value, rank, Reverse(at)))
    };
    let all = claims.iter().zip(shares.iter()).enumerate();
    let mut bids: BinaryHeap<_> = all
        .filter_map(|(at, (claim, share))| bid(at, claim, share))
        .collect();
    while left.slots > 0
        && let Some((_, _, Reverse(at))) = bids.pop()
        && let (Some(claim), Some(share)) = (claims.get(at), shares.get_mut(at))
    {
        if claim.slot_bytes <= left.bytes {
            left.slots -= 1;
            left.bytes -= claim.slot_bytes;
            share.slots += 1;
            bids.extend(bid(at, claim, share));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const PLENTY: u64 = 1 << 50;

    fn used(wanted: u32, recent: u64, used_ns: u64) -> Claim {
        Claim {
            wanted,
            slot_bytes: 16 * MIB,
            load_bytes: 100 * MIB,
            can_load: true,
            recent,
            used_ns,
            is_idle: wanted == 0,
            ..Claim::default()
        }
    }

    fn slots(slots: u32, claims: &[Claim]) -> Vec<u32> {
        let budget = Budget {
            slots,
            bytes: PLENTY,
        };
        divide(budget, claims).iter().map(|s| s.slots).collect()
    }

    #[test]
    fn shares_are_in_proportion_to_demands_and_configured_marks_come_first() {
        let claims = [used(30, 1, 1), used(10, 1, 2), used(1, 1, 3), used(0, 9, 9)];
        assert_eq!(slots(100, &claims), [30, 10, 1, 0]);
        assert_eq!(slots(20, &claims), [15, 5, 0, 0]);
        let floor = Claim {
            floor: 4,
            ..used(0, 0, 0)
        };
        let claims = [used(30, 1, 1), floor, used(10, 1, 2)];
        assert_eq!(slots(20, &claims), [12, 4, 4]);
        assert_eq!(
            slots(3, &claims),
            [0, 3, 0],
            "the budget is above the marks"
        );
    }

    #[test]
    fn spare_slots_give_way_to_demand_the_least_recently_used_first() {
        let spare = |used_ns| Claim {
            spare: 4,
            ..used(0, 0, used_ns)
        };
        let claims = [spare(2), used(6, 1, 9), spare(1), spare(3)];
        assert_eq!(slots(100, &claims), [4, 6, 4, 4]);
        assert_eq!(slots(9, &claims), [1, 6, 1, 1]);
        assert_eq!(slots(8, &claims), [1, 6, 0, 1]);
        assert_eq!(slots(6, &claims), [0, 6, 0, 0]);
        // They do not take the memory of a template in use either.
        let budget = Budget {
            slots: 100,
            bytes: 6 * 16 * MIB + 100 * MIB + 16 * MIB,
        };
        let shares = divide(budget, &claims);
        assert!(shares[1].loads && shares.iter().map(|s| s.slots).sum::<u32>() == 7);
    }

    #[test]
    fn between_equals_the_least_used_goes_without_and_what_is_held_is_kept() {
        let claims = [used(1, 5, 1), used(1, 5, 3), used(1, 5, 2)];
        assert_eq!(slots(2, &claims), [0, 1, 1], "the least recently used");
        let mut held = claims;
        held[0].has = 1;
        assert_eq!(slots(2, &held), [1, 1, 0], "a slot stays where it is");
        held[2].recent = 11;
        assert_eq!(
            slots(1, &held),
            [0, 0, 1],
            "unless another is used far more"
        );
    }

    #[test]
    fn memory_that_is_left_holds_the_templates_that_are_used_most() {
        let budget = |mib| Budget {
            slots: 10,
            bytes: mib * MIB,
        };
        let loads = |mib, claims: &[Claim]| -> Vec<bool> {
            divide(budget(mib), claims)
                .iter()
                .map(|s| s.loads)
                .collect()
        };
        let claims = [used(1, 5, 1), used(1, 5, 2), used(0, 5, 3)];
        assert_eq!(loads(232, &claims), [true, true, false]);
        assert_eq!(
            loads(231, &claims),
            [false, true, false],
            "slots come first"
        );
        // An idle template is unloaded although there is room. A used one remains loaded without a slot.
        let loaded = claims.map(|claim| Claim {
            is_loaded: true,
            ..claim
        });
        assert_eq!(loads(1000, &loaded), [true, true, false]);
        let kept = Claim {
            is_idle: false,
            ..loaded[2]
        };
        assert_eq!(loads(1000, &[kept]), [true]);
        let diff = Claim {
            can_load: false,
            ..claims[0]
        };
        assert_eq!(loads(1000, &[diff]), [false]);
    }

    #[test]
    fn a_host_short_of_memory_shrinks_the_budget() {
        let budget = Budget {
            slots: 9,
            bytes: 100,
        };
        let held = Held {
            slots: 2,
            bytes: 60,
        };
        assert_eq!(budget.within(held, 1000).bytes, 100);
        assert_eq!(budget.within(held, 10).bytes, 70);
        assert_eq!(budget.within(held, -20).bytes, 40);
        assert_eq!(budget.within(held, -20).beside(30).bytes, 10);
        assert_eq!(budget.beside(101).bytes, 0);
        assert_eq!(budget.within(held, i128::MIN).bytes, 0);
        let supply = |held, slot_bytes, load_bytes| {
            let lack = Lack {
                slot_bytes,
                load_bytes,
                ..Lack::default()
            };
            budget.supply(held, &lack)
        };
        assert_eq!(supply(held, 40, None), Some(Supplied::Slot));
        assert_eq!(supply(held, 41, None), None);
        assert_eq!(supply(held, 0, Some(40)), Some(Supplied::Memory));
        assert_eq!(supply(held, 0, Some(41)), Some(Supplied::Slot));
        let full = Held { slots: 9, ..held };
        assert_eq!(supply(full, 0, None), None);
    }

    #[test]
    fn a_template_that_does_not_fit_does_not_stop_the_fills_of_others() {
        let budget = Budget {
            slots: 9,
            bytes: 100 * MIB,
        };
        let room = Room {
            available: 100 * MIB,
            max: 9,
            ..Room::default()
        };
        let lack = |expected, slot_bytes| Lack {
            need: Need {
                expected: expected * MIB,
                ..Need::default()
            },
            slot_bytes: slot_bytes * MIB,
            load_bytes: None,
        };
        let (too_large, too_much, fits) = (lack(51, 16), lack(16, 101), lack(50, 100));
        let first = |lacks: &[Lack]| {
            let lacks = lacks.iter().copied().enumerate();
            supply_first(budget, Held::default(), &room, lacks)
        };
        assert_eq!(
            first(&[too_large, too_much, fits, fits]),
            Some((2, Supplied::Slot))
        );
        assert_eq!(first(&[too_large, too_much]), None);
    }

    fn claim() -> impl Strategy<Value = Claim> {
        let numbers = (
            0..6_u32,
            0..40_u32,
            0..6_u32,
            0..20_u32,
            0..8_u64,
            0..1000_u64,
        );
        let memory = (0..400_u64, 0..900_u64, any::<[bool; 3]>());
        (numbers, memory).prop_map(
            |((floor, wanted, spare, has, recent, used_ns), (slot, load, is))| Claim {
                floor,
                wanted,
                spare,
                has,
                slot_bytes: slot,
                load_bytes: load,
                can_load: is[0],
                is_loaded: is[1],
                recent,
                used_ns,
                is_idle: is[2],
            },
        )
    }

    fn claims() -> impl Strategy<Value = Vec<Claim>> {
        prop::collection::vec(claim(), 0..40)
    }

    fn bytes(claims: &[Claim], shares: &[Share]) -> u64 {
        let of = |(claim, share): (&Claim, &Share)| {
            let load = if share.loads { claim.load_bytes } else { 0 };
            claim.slot_bytes * u64::from(share.slots) + load
        };
        claims.iter().zip(shares).map(of).sum()
    }

    proptest! {
        #[test]
        fn the_budget_is_never_exceeded_and_no_one_gets_more_than_the_demand(
            claims in claims(), slots in 0..200_u32, budget in 0..60_000_u64,
        ) {
            let budget = Budget { slots, bytes: budget };
            let shares = divide(budget, &claims);
            prop_assert!(shares.iter().map(|s| s.slots).sum::<u32>() <= budget.slots);
            prop_assert!(bytes(&claims, &shares) <= budget.bytes);
            for (claim, share) in claims.iter().zip(&shares) {
                prop_assert!(share.slots <= claim.most());
                prop_assert!(!share.loads || claim.needs_memory(*share));
            }
        }

        #[test]
        fn with_plenty_everyone_gets_what_is_demanded(claims in claims()) {
            let plenty = Budget { slots: u32::MAX, bytes: PLENTY };
            for (claim, share) in claims.iter().zip(divide(plenty, &claims)) {
                prop_assert_eq!(share.slots, claim.most());
                prop_assert_eq!(share.loads, claim.needs_memory(share));
            }
        }

        #[test]
        fn configured_marks_are_served_before_demand(claims in claims(), more in 0..50_u32) {
            let floors: u32 = claims.iter().map(|c| c.floor).sum();
            for (claim, share) in claims.iter().zip(slots(floors + more, &claims)) {
                prop_assert!(share >= claim.floor);
            }
        }

        #[test]
        fn spare_slots_take_nothing_from_marks_and_demand(
            claims in claims(), slots in 0..200_u32, budget in 0..60_000_u64,
        ) {
            let budget = Budget { slots, bytes: budget };
            let without: Vec<_> = claims.iter().map(|c| Claim { spare: 0, ..*c }).collect();
            let of_both = divide(budget, &claims).into_iter().zip(divide(budget, &without));
            for (with, without) in of_both {
                prop_assert!(with.slots >= without.slots);
                prop_assert!(with.loads || !without.loads || without.slots == 0);
            }
        }

        #[test]
        fn no_one_gains_by_taking_a_slot_of_another(claims in claims(), budget in 0..200_u32) {
            let claims: Vec<_> = claims.into_iter().map(|c| Claim { floor: 0, spare: 0, ..c }).collect();
            let shares = slots(budget, &claims);
            for (a, of_a) in claims.iter().zip(&shares).filter(|(c, s)| **s < c.wanted) {
                for (b, of_b) in claims.iter().zip(&shares).filter(|(_, s)| **s > 0) {
                    // The value of the next slot is at most the value of the other's last one.
                    prop_assert!(a.wanted * of_b <= b.wanted * (of_a + 1));
                }
            }
        }

        #[test]
        fn a_larger_budget_takes_no_slot_away(claims in claims(), budget in 0..200_u32) {
            let more = slots(budget + 1, &claims);
            prop_assert!(slots(budget, &claims).iter().zip(&more).all(|(a, b)| a <= b));
        }

        #[test]
        fn a_division_is_stable(claims in claims(), slots in 0..200_u32, budget in 0..60_000_u64) {
            let budget = Budget { slots, bytes: budget };
            let shares = divide(budget, &claims);
            let is_idle = |claim: &Claim, share: &Share| claim.is_idle && share.slots == 0;
            let next: Vec<_> = claims.iter().zip(&shares).map(|(claim, share)| Claim {
                has: share.slots,
                is_loaded: share.loads,
                is_idle: is_idle(claim, share),
                ..*claim
            }).collect();
            let again = divide(budget, &next);
            let counts = |shares: &[Share]| -> Vec<u32> { shares.iter().map(|s| s.slots).collect() };
            prop_assert_eq!(counts(&again), counts(&shares));
            for ((claim, a), b) in claims.iter().zip(&shares).zip(&again) {
                // Loaded templates remain loaded. More may be loaded, if they were loaded before and the room left is
                // enough now.
                prop_assert!(!a.loads || b.loads || !claim.can_load);
            }
        }
    }
}
