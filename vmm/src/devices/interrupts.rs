//! Sets of device slots whose interrupts are to be raised.

use std::ops::{BitOr, BitOrAssign};

/// A set of device slots; bit `i` is slot `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interrupts(pub u32);

impl Interrupts {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The set that contains only `slot` if `wants` is true, and the empty set otherwise.
    pub(super) fn of(slot: usize, wants: bool) -> Self {
        Self(u32::from(wants) << slot)
    }

    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[must_use]
    pub fn contains(self, slot: usize) -> bool {
        slot < 32 && self.0 & (1 << slot) != 0
    }

    /// The slots in the set in ascending order.
    pub fn slots(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |slot| self.contains(*slot))
    }
}

impl BitOr for Interrupts {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Interrupts {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
