//! The map of rules, read and written one whole set at a time. Batch system calls keep the number of calls per set
//! small, however many rules it has. Policies with the same rules share a set.
//!
//! The kernel walks the trie in post-order, children before their parents, so the entries of one set are consecutive.
//! Every set has a *sentinel*, a rule for `::/128`, which precedes all other entries of the set in this order. A walk
//! from a set's sentinel to the next set's first entry therefore finds every rule of the set, including rules that this
//! server did not write.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::AsFd,
};

use aya::maps::{LpmTrie, Map, MapData, MapError, lpm_trie::Key};

use self::sys::RawKey;
use crate::datapath::layout::{Address, Rule, RuleKey};

mod sys;

/// Number of the set that applies to all sandboxes.
pub(crate) const FOR_ALL: u32 = 0;
/// The first entry of every set in the kernel's order.
pub(crate) const SENTINEL: Prefix = (128, Address([0; 16]));
/// Bits of the set's number, which precedes the address in a key.
const NUMBER_BITS: u32 = 32;
/// Entries per system call when the whole map is read.
const CHUNK: usize = 1024;

/// Prefix length in bits and address. A prefix for IPv4 has 96 bits or more.
pub(crate) type Prefix = (u8, Address);
/// The entries of one set.
pub(crate) type Rules = BTreeMap<Prefix, Rule>;

/// The map in the kernel.
#[derive(Debug)]
pub(crate) struct RuleMap(MapData);

impl TryFrom<Map> for RuleMap {
    type Error = MapError;

    fn try_from(map: Map) -> Result<Self, MapError> {
        // Checks the key and value sizes, on which the batch calls rely.
        LpmTrie::<&MapData, RuleKey, Rule>::try_from(&map)?;
        match map {
            Map::LpmTrie(data) => Ok(Self(data)),
            _ => Err(MapError::KeyNotFound),
        }
    }
}

impl RuleMap {
    /// Writes entries to a set, replacing entries with the same prefixes.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails. Some entries may have been written.
    pub(crate) fn write(&mut self, number: u32, rules: &Rules) -> io::Result<()> {
        let (keys, values): (Vec<RawKey>, Vec<Rule>) = rules
            .iter()
            .map(|(prefix, rule)| (raw(number, prefix), *rule))
            .unzip();
        sys::update(self.0.fd().as_fd(), &keys, &values)
    }

    /// Removes entries of a set and skips prefixes that are not in it.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails. Some entries may remain.
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

    /// Reads at most `most` entries of a set, sentinel included. Returns no entries if the sentinel is missing.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails.
    pub(crate) fn read(&self, number: u32, most: usize) -> io::Result<Rules> {
        let mut found = Rules::new();
        let from = raw(number, &SENTINEL);
        // A lookup finds the longest matching prefix. If the sentinel is missing, this may be a shorter one.
        let sentinel = sys::lookup(self.0.fd().as_fd(), &from)?;
        let Some(sentinel) = sentinel.filter(|rule| rule.prefix == SENTINEL.0) else {
            return Ok(found);
        };
        found.insert(SENTINEL, sentinel);
        let next = sys::walk(self.0.fd().as_fd(), Some(&from), most.saturating_sub(1))?;
        let entries = next.iter().map(|(key, rule)| (of_raw(key), *rule));
        let in_set = entries.take_while(|((of, _), _)| *of == number);
        found.extend(in_set.map(|((_, prefix), rule)| (prefix, rule)));
        Ok(found)
    }

    /// Reads the entries of all sets, by number.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails.
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
    Key::new(
        NUMBER_BITS + u32::from(*prefix),
        RuleKey { number, address },
    )
}

/// The set's number and the prefix in a key.
fn of_raw(key: &RawKey) -> (u32, Prefix) {
    let RuleKey { number, address } = key.data();
    let bits = u8::try_from(key.prefix_len().saturating_sub(NUMBER_BITS)).unwrap_or(u8::MAX);
    (number, (bits, address))
}

/// The sets that this server wrote or took over from its predecessor, with their reference counts.
#[derive(Debug)]
pub(crate) struct RuleSets {
    pub(crate) map: RuleMap,
    sets: BTreeMap<u32, Set>,
    /// Numbers of the sets that further policies may share, by hash of the rules. If two sets have the same hash, the
    /// later one is not shared.
    shared: BTreeMap<u64, u32>,
    next_number: u32,
}

#[derive(Debug)]
struct Set {
    rules: Rules,
    hash: u64,
    /// TAPs that use the set.
    users: usize,
}

impl RuleSets {
    pub(crate) fn new(map: RuleMap) -> Self {
        Self {
            map,
            sets: BTreeMap::new(),
            shared: BTreeMap::new(),
            next_number: FOR_ALL + 1,
        }
    }

    /// Takes over the sets of a predecessor. `used` contains the set number of each live TAP, so a number occurs once
    /// per user. Every other set, except the one for all sandboxes, is removed.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails.
    pub(crate) fn take_over(&mut self, used: &[u32]) -> io::Result<()> {
        let found = self.map.all()?;
        let last = found.keys().chain(used).max().copied();
        self.next_number = last.unwrap_or(FOR_ALL).wrapping_add(1).max(FOR_ALL + 1);
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

    /// Returns the number of a set with these rules and adds a user to the set. Writes a new set unless a shared set
    /// has the same rules.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails. No set was added.
    pub(crate) fn acquire(&mut self, rules: Rules) -> io::Result<u32> {
        let hash = hash(&rules);
        let known = self.shared.get(&hash).copied();
        if let Some(number) = known
            && let Some(set) = self.sets.get_mut(&number)
            && set.rules == rules
        {
            set.users += 1;
            return Ok(number);
        }
        let number = self.next_number;
        if let Err(error) = self.map.write(number, &rules) {
            // No TAP uses this number. Entries that cannot be removed now are removed at the next start.
            let _removed_at_next_start = self.map.remove(number, rules.keys());
            return Err(error);
        }
        self.next_number = number.wrapping_add(1).max(FOR_ALL + 1);
        self.shared.entry(hash).or_insert(number);
        let users = 1;
        self.sets.insert(number, Set { rules, hash, users });
        Ok(number)
    }

    /// Removes a user from a set. After the last user, also removes the set and its rules. Does nothing for
    /// [`FOR_ALL`], the set number in the entry of a TAP without a policy.
    pub(crate) fn release(&mut self, number: u32) {
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
        // No TAP uses this number. Entries that cannot be removed now are removed at the next start.
        let _removed_at_next_start = self.map.remove(number, set.rules.keys());
    }

    /// Stops sharing a set with further policies, after another program changed it in the kernel.
    pub(crate) fn stop_sharing(&mut self, number: u32) {
        self.shared.retain(|_, shared| *shared != number);
    }

    /// The rules that the kernel must have under a number. `None`: no such set.
    pub(crate) fn expected(&self, number: u32) -> Option<&Rules> {
        self.sets.get(&number).map(|set| &set.rules)
    }

    /// Replaces the rules that apply to all sandboxes. Writes only the differences.
    ///
    /// # Errors
    /// Returns an error if bpf(2) fails. The next call writes the differences again.
    pub(crate) fn set_for_all(&mut self, rules: Rules) -> io::Result<()> {
        let known = self.expected(FOR_ALL);
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
