//! A table whose keys never come back: a key of something that is gone finds nothing, also when its place
//! was taken again in the same turn of the event loop.

/// Where something is, and which of those that were there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// 28 bits each of generation and place, for a poller's token.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation & MASK) << BITS | u64::from(self.index & MASK)
    }

    /// The inverse.
    pub(crate) fn from_bits(bits: u64) -> Self {
        let part = |bits: u64| u32::try_from(bits & u64::from(MASK)).unwrap_or_default();
        Self {
            index: part(bits),
            generation: part(bits >> BITS),
        }
    }
}

/// Bits of each half of a token.
pub(crate) const BITS: u32 = 28;
const MASK: u32 = (1 << BITS) - 1;

/// The table.
pub(crate) struct Slots<T> {
    places: Vec<(u32, Option<T>)>,
    used: usize,
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self {
            places: Vec::new(),
            used: 0,
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// The key that the next [`Slots::insert`] will give.
    pub(crate) fn next_key(&self) -> Key {
        let free = self.places.iter().position(|(_, place)| place.is_none());
        let index = free.unwrap_or(self.places.len());
        let generation = self
            .places
            .get(index)
            .map_or(0, |(generation, _)| *generation);
        Key {
            index: u32::try_from(index).unwrap_or(MASK),
            generation,
        }
    }

    pub(crate) fn insert(&mut self, thing: T) -> Key {
        let key = self.next_key();
        let index = usize::try_from(key.index).unwrap_or(usize::MAX);
        match self.places.get_mut(index) {
            Some((_, place)) => *place = Some(thing),
            None => self.places.push((key.generation, Some(thing))),
        }
        self.used += 1;
        key
    }

    fn place(&mut self, key: Key) -> Option<&mut (u32, Option<T>)> {
        let place = self.places.get_mut(usize::try_from(key.index).ok()?)?;
        (place.0 == key.generation).then_some(place)
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.place(key)?.1.as_mut()
    }

    /// Takes it out for good.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.place(key)?;
        let thing = place.1.take()?;
        place.0 = (place.0 + 1) & MASK;
        self.used -= 1;
        Some(thing)
    }

    /// All of them with their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        (0..)
            .zip(&self.places)
            .filter_map(|(index, (generation, place))| {
                let key = Key {
                    index,
                    generation: *generation,
                };
                Some((key, place.as_ref()?))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_old_key_finds_nothing() {
        let mut slots = Slots::new();
        let old = slots.insert('a');
        assert_eq!(slots.remove(old), Some('a'));
        let new = slots.insert('b');
        assert_eq!(slots.get_mut(old), None);
        assert_eq!(slots.get_mut(new), Some(&mut 'b'));
        assert_eq!((slots.remove(old), slots.len()), (None, 1));
    }

    proptest! {
        #[test]
        fn tokens_keep_keys(index in 0..MASK, generation in 0..MASK) {
            let key = Key { index, generation };
            prop_assert_eq!(Key::from_bits(key.to_bits()), key);
            prop_assert!(key.to_bits() < 1 << (2 * BITS));
        }
    }
}
