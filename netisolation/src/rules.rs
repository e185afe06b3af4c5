//! The map of rules, a whole set at a time: the rules of a policy are written, read back and removed by one call of
//! the kernel each, however many there are. Policies with the same rules share a set.
//!
//! The kernel walks the trie in post-order, children before their parents, so the entries of one set follow each
//! other. The first of them is its *mark*, the entry for `::` alone: nothing is further down and to the left. So a
//! walk from the mark to another set's first entry finds all that is under a number, what nobody meant to be there
//! included.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::AsFd,
};

use aya::maps::{LpmTrie, Map, MapData, MapError, lpm_trie::Key};

use crate::{
    compile::{FOR_ALL, Prefix, Rules},
    layout::{Address, Rule, RuleKey},
};

mod sys;

/// A key as the kernel has it.
type RawKey = Key<RuleKey>;

/// The first entry of every set, in the kernel's order.
pub(crate) const MARK: Prefix = (128, Address([0; 16]));
/// Bits of the number, which comes before the address.
const NUMBER: u32 = 32;
/// Entries of one call, where it is not known how many there are.
const CHUNK: usize = 1024;

/// The map.
#[derive(Debug)]
pub(crate) struct RuleMap(MapData);

impl TryFrom<Map> for RuleMap {
    type Error = MapError;

    fn try_from(map: Map) -> Result<Self, MapError> {
        // Compares the sizes of keys and values, on which the calls rely.
        LpmTrie::<&MapData, RuleKey, Rule>::try_from(&map)?;
        match map {
            Map::LpmTrie(data) => Ok(Self(data)),
            _ => Err(MapError::KeyNotFound),
        }
    }
}

impl RuleMap {
    /// Writes entries under a number, in place of those with the same prefixes.
    ///
    /// # Errors
    /// Of bpf(2); then some may be written.
    pub(crate) fn write(&mut self, number: u32, rules: &Rules) -> io::Result<()> {
        let (keys, values): (Vec<RawKey>, Vec<Rule>) = rules
            .iter()
            .map(|(prefix, rule)| (raw(number, prefix), *rule))
            .unzip();
        sys::update(self.0.fd().as_fd(), &keys, &values)
    }

    /// Removes entries; those that are not there are passed over.
    ///
    /// # Errors
    /// Of bpf(2); then some may be left.
    pub(crate) fn remove<'a>(
        &mut self,
        number: u32,
        prefixes: impl IntoIterator<Item = &'a Prefix>,
    ) -> io::Result<()> {
        let prefixes = prefixes.into_iter();
        let keys: Vec<RawKey> = prefixes.map(|prefix| raw(number, prefix)).collect();
        let mut rest = keys.as_slice();
        while !rest.is_empty() {
            let (removed, outcome) = sys::delete(self.0.fd().as_fd(), rest);
            match outcome {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    rest = rest.get(removed + 1..).unwrap_or_default();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What is under a number, but no more than `most` entries. Nothing if the mark is missing.
    ///
    /// # Errors
    /// Of bpf(2).
    pub(crate) fn read(&self, number: u32, most: usize) -> io::Result<Rules> {
        let mut found = Rules::new();
        let from = raw(number, &MARK);
        // A lookup finds the longest prefix that there is.
        let mark = sys::lookup(self.0.fd().as_fd(), &from)?;
        let Some(mark) = mark.filter(|rule| rule.prefix == MARK.0) else {
            return Ok(found);
        };
        found.insert(MARK, mark);
        let next = sys::walk(self.0.fd().as_fd(), Some(&from), most.saturating_sub(1))?;
        let entries = next.iter().map(|(key, rule)| (of_raw(key), *rule));
        let ours = entries.take_while(|((of, _), _)| *of == number);
        found.extend(ours.map(|((_, prefix), rule)| (prefix, rule)));
        Ok(found)
    }

    /// Everything, by number.
    ///
    /// # Errors
    /// Of bpf(2).
    pub(crate) fn all(&self) -> io::Result<BTreeMap<u32, Rules>> {
        let mut all: BTreeMap<u32, Rules> = BTreeMap::new();
        let mut from = None;
        loop {
            let next = sys::walk(self.0.fd().as_fd(), from.as_ref(), CHUNK)?;
            for (key, rule) in &next {
                let (number, prefix) = of_raw(key);
                all.entry(number).or_default().insert(prefix, *rule);
            }
            if next.len() < CHUNK {
                return Ok(all);
            }
            from = next.last().map(|(key, _)| *key);
        }
    }
}

fn raw(number: u32, (prefix, address): &Prefix) -> RawKey {
    let address = *address;
    Key::new(NUMBER + u32::from(*prefix), RuleKey { number, address })
}

/// Number and prefix.
fn of_raw(key: &RawKey) -> (u32, Prefix) {
    let RuleKey { number, address } = key.data();
    let bits = u8::try_from(key.prefix_len().saturating_sub(NUMBER)).unwrap_or(u8::MAX);
    (number, (bits, address))
}

/// What is in the map, as this server has written it or taken it over.
#[derive(Debug)]
pub(crate) struct RuleSets {
    pub(crate) map: RuleMap,
    sets: BTreeMap<u32, Set>,
    /// Those that more policies may share, by their hashes. Of two with one hash the second is not shared.
    shared: BTreeMap<u64, u32>,
    next: u32,
}

#[derive(Debug)]
struct Set {
    rules: Rules,
    hash: u64,
    /// TAPs that have it.
    users: usize,
}

impl RuleSets {
    /// Knows of nothing yet.
    pub(crate) fn new(map: RuleMap) -> Self {
        Self {
            map,
            sets: BTreeMap::new(),
            shared: BTreeMap::new(),
            next: FOR_ALL + 1,
        }
    }

    /// Goes on with what a predecessor wrote: `used` has the number of each TAP that lives. What else there is is
    /// removed, but for what holds for all.
    ///
    /// # Errors
    /// Of bpf(2).
    pub(crate) fn take_over(&mut self, used: &[u32]) -> io::Result<()> {
        let found = self.map.all()?;
        let last = found.keys().chain(used).max().copied();
        self.next = last.unwrap_or(FOR_ALL).wrapping_add(1).max(FOR_ALL + 1);
        for (number, rules) in found {
            let users = used.iter().filter(|other| **other == number).count();
            if users == 0 && number != FOR_ALL {
                self.map.remove(number, rules.keys())?;
                continue;
            }
            let hash = hash(&rules);
            if number != FOR_ALL {
                self.shared.entry(hash).or_insert(number);
            }
            self.sets.insert(number, Set { rules, hash, users });
        }
        Ok(())
    }

    /// The number of these rules, which has one user more; they are written if nobody has them yet.
    ///
    /// # Errors
    /// Of bpf(2); then nothing is there.
    pub(crate) fn enter(&mut self, rules: Rules) -> io::Result<u32> {
        let hash = hash(&rules);
        let known = self.shared.get(&hash).copied();
        if let Some(number) = known
            && let Some(set) = self.sets.get_mut(&number)
            && set.rules == rules
        {
            set.users += 1;
            return Ok(number);
        }
        let number = self.next;
        if let Err(error) = self.map.write(number, &rules) {
            // What stays is under a number that no TAP has, and goes at the next start.
            let _later = self.map.remove(number, rules.keys());
            return Err(error);
        }
        self.next = number.wrapping_add(1).max(FOR_ALL + 1);
        self.shared.entry(hash).or_insert(number);
        let users = 1;
        self.sets.insert(number, Set { rules, hash, users });
        Ok(number)
    }

    /// One user less; the last one's leaving removes the rules. What holds for all is nobody's to leave: the number is
    /// that of a TAP without rules.
    pub(crate) fn leave(&mut self, number: u32) {
        if number == FOR_ALL {
            return;
        }
        let Entry::Occupied(mut entry) = self.sets.entry(number) else {
            return;
        };
        entry.get_mut().users -= 1;
        if entry.get().users > 0 {
            return;
        }
        let set = entry.remove();
        if self.shared.get(&set.hash) == Some(&number) {
            self.shared.remove(&set.hash);
        }
        // As in `enter`.
        let _later = self.map.remove(number, set.rules.keys());
    }

    /// Nobody else is given this number: somebody changed what is under it.
    pub(crate) fn distrust(&mut self, number: u32) {
        self.shared.retain(|_, shared| *shared != number);
    }

    /// What has to be under a number; nothing under one that is not there.
    pub(crate) fn of(&self, number: u32) -> Option<&Rules> {
        self.sets.get(&number).map(|set| &set.rules)
    }

    /// Makes these the rules that hold for all; only differences reach the map.
    ///
    /// # Errors
    /// Of bpf(2); then the next call writes them.
    pub(crate) fn set_for_all(&mut self, rules: Rules) -> io::Result<()> {
        let known = self.of(FOR_ALL);
        let differs = |(prefix, rule): &(&Prefix, &Rule)| {
            known.and_then(|known| known.get(*prefix)) != Some(*rule)
        };
        let added: Rules = rules
            .iter()
            .filter(differs)
            .map(|(k, r)| (*k, *r))
            .collect();
        let known = known.into_iter().flat_map(Rules::keys);
        let removed: Vec<Prefix> = known.filter(|k| !rules.contains_key(*k)).copied().collect();
        self.map.write(FOR_ALL, &added)?;
        self.map.remove(FOR_ALL, &removed)?;
        let (hash, users) = (0, 1);
        self.sets.insert(FOR_ALL, Set { rules, hash, users });
        Ok(())
    }
}

fn hash(rules: &Rules) -> u64 {
    let mut hasher = DefaultHasher::new();
    rules.hash(&mut hasher);
    hasher.finish()
}
