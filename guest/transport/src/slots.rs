//! A table whose keys are not reused until a place has held 2^28 entries. The key of a removed entry finds nothing,
//! even if another entry has taken its place in the same turn of the event loop.

/// An index into a table, and the generation of the entry there. The default is a placeholder, for tokens that refer to
/// no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// Packs the generation and the index, 28 bits each, for a poller's token.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation & MASK) << BITS | u64::from(self.index & MASK)
    }

    /// The inverse of [`Key::to_bits`].
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        let part = |bits: u64| u32::try_from(bits & u64::from(MASK)).unwrap_or_default();
        Self {
            index: part(bits),
            generation: part(bits >> BITS),
        }
    }
}

/// Bits of the index, and of the generation, in a packed key.
pub(crate) const BITS: u32 = 28;
const MASK: u32 = (1 << BITS) - 1;

/// A table of entries with unique keys.
#[derive(Debug)]
pub struct Slots<T> {
    places: Vec<(u32, Option<T>)>,
    used: usize,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Slots<T> {
    #[must_use]
    pub fn new() -> Self {
        Self {
            places: Vec::new(),
            used: 0,
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.used
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// The key that the next [`Slots::insert`] returns.
    #[must_use]
    pub fn next_key(&self) -> Key {
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

    /// Adds an entry in the first free place.
    pub fn insert(&mut self, thing: T) -> Key {
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

    #[must_use]
    pub fn get(&self, key: Key) -> Option<&T> {
        let place = self.places.get(usize::try_from(key.index).ok()?)?;
        if place.0 == key.generation {
            place.1.as_ref()
        } else {
            None
        }
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.place(key)?.1.as_mut()
    }

    /// Removes an entry; its key finds nothing from now on.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.place(key)?;
        let thing = place.1.take()?;
        place.0 = (place.0 + 1) & MASK;
        self.used -= 1;
        Some(thing)
    }

    /// All entries with their keys, in the order of their indices.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
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
