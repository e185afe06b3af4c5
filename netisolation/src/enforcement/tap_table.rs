//! The TAPs by number: their devices, their entries in the maps, and the sandboxes that use them.

use std::{collections::BTreeMap, sync::Arc};

use aya::maps::{Array, HashMap, MapData};
use model::SandboxId;

use crate::{
    datapath::{
        Datapath,
        layout::{self, State},
    },
    error::{IsolationError, system},
    policy::Policy,
    taps::{
        device::{self, Device},
        reset::OwnedTap,
        tap::TapIndex,
    },
};

pub(crate) struct TapTable {
    /// TAP number by device index.
    indices: HashMap<MapData, u32, u32>,
    entries: Array<MapData, layout::Tap>,
    states: Array<MapData, State>,
    attachments: BTreeMap<u32, Attachment>,
    max_taps: u32,
    pub(crate) next_index: u32,
    /// The last result of [`TapTable::next_unclaimed`].
    last_unclaimed: u32,
}

/// A TAP device with the program on it, and the sandbox that uses it.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Name of the device.
    pub(crate) name: String,
    /// The TAP's entry in the map, as this server wrote it.
    pub(crate) entry: layout::Tap,
    pub(crate) sandbox: Option<(SandboxId, Arc<Policy>)>,
    pub(crate) usage: Usage,
}

#[derive(Debug)]
pub(crate) enum Usage {
    /// In the stock.
    Ready(OwnedTap),
    /// In use by a VM, or released. `None` if this server holds no descriptor: a predecessor handed the TAP out, or the
    /// TAP was released. While a VM uses it, this server's descriptor keeps the device even if the VMM dies.
    Leased(Option<OwnedTap>),
    /// The device was removed, or the TAP has moved to another number. The next sweep removes this number's flows, then
    /// its map entries.
    Gone,
}

impl Attachment {
    fn new(name: String, entry: layout::Tap) -> Self {
        Self {
            name,
            entry,
            sandbox: None,
            usage: Usage::Leased(None),
        }
    }

    /// Whether the TAP is in the stock.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.usage, Usage::Ready(_))
    }

    /// Whether neither this server nor one of its sandboxes uses the TAP: a VM of a predecessor has it open, or no process.
    fn is_unclaimed(&self) -> bool {
        matches!(self.usage, Usage::Leased(None)) && self.sandbox.is_none()
    }

    fn is_device_present(&self) -> bool {
        device::index(&self.name).ok() == Some(self.entry.ifindex)
    }
}

impl TapTable {
    pub(crate) fn new(
        indices: HashMap<MapData, u32, u32>,
        entries: Array<MapData, layout::Tap>,
        states: Array<MapData, State>,
        max_taps: u32,
    ) -> Self {
        Self {
            indices,
            entries,
            states,
            attachments: BTreeMap::new(),
            max_taps,
            next_index: 1,
            last_unclaimed: 0,
        }
    }

    /// Takes over a predecessor's TAPs whose devices still exist, and clears all other entries. Returns all entries
    /// that the predecessor left, including entries of removed TAPs.
    pub(crate) fn take_over(
        &mut self,
        datapath: &Datapath,
    ) -> Result<Vec<layout::Tap>, IsolationError> {
        let found: Vec<layout::Tap> = (1..=self.max_taps).map(|i| self.read_entry(i)).collect();
        for (index, ifindex) in datapath.tap_links() {
            match device::name(ifindex) {
                Ok(name) if (1..=self.max_taps).contains(&index) => {
                    self.take_over_tap(datapath, index, ifindex, name)?;
                }
                _ => datapath.remove_tap_link(index, ifindex),
            }
        }
        for index in 1..=self.max_taps {
            let is_used = self.read_entry(index) != layout::Tap::default();
            if is_used && !self.attachments.contains_key(&index) {
                self.write_entry(index, &layout::Tap::default())?;
            }
        }
        let stale: Vec<u32> = self
            .indices
            .keys()
            .flatten()
            .filter(|ifindex| {
                !self
                    .attachments
                    .values()
                    .any(|a| a.entry.ifindex == *ifindex)
            })
            .collect();
        for ifindex in stale {
            let _absent = self.indices.remove(&ifindex);
        }
        Ok(found)
    }

    /// Takes over a TAP with a pinned link. If the maps have no entry for the TAP, because the predecessor's maps had a
    /// different layout, writes an entry that denies everything until [`crate::Isolation::adopt`]. If the program
    /// cannot be replaced, the TAP is not taken over: the old program stays on it, with an entry that denies
    /// everything.
    fn take_over_tap(
        &mut self,
        datapath: &Datapath,
        index: u32,
        ifindex: u32,
        name: String,
    ) -> Result<(), IsolationError> {
        let mut entry = self.read_entry(index);
        if entry.ifindex != ifindex {
            entry = closed_entry(ifindex);
            self.write_entry(index, &entry)?;
        }
        self.write_index(ifindex, index)?;
        if datapath.replace_tap_program(index, ifindex).is_err() {
            if device::index(&name).ok() != Some(ifindex) {
                datapath.remove_tap_link(index, ifindex);
            }
            return Ok(());
        }
        let mut attachment = Attachment::new(name, entry);
        if let Some(device) = device::reopen_tap(&attachment.name, ifindex).unwrap_or(None) {
            // No process has the TAP open. If no sandbox has used it, it was in the stock; otherwise the predecessor was
            // killed just after the TAP was taken.
            let is_unused = entry.tenure == 0 && entry.policy == 0;
            let Some(tap) = OwnedTap::take_over(device).ok().filter(|_| is_unused) else {
                datapath.remove_tap_link(index, ifindex);
                return Ok(());
            };
            attachment.usage = Usage::Ready(tap);
        }
        self.attachments.insert(index, attachment);
        Ok(())
    }

    /// Assigns a number to a new device and writes entries that deny everything.
    pub(crate) fn add(&mut self, device: &Device) -> Result<u32, IsolationError> {
        let index = self.free_index()?;
        let entry = closed_entry(device.index);
        let written = self.states.set(index, State::default(), 0);
        written.map_err(|e| system("write a TAP's state", e))?;
        self.write_entry(index, &entry)?;
        self.write_index(device.index, index)?;
        let attachment = Attachment::new(device.name.clone(), entry);
        self.attachments.insert(index, attachment);
        Ok(index)
    }

    /// Cycles through the numbers so that each is reused as late as possible. A late packet or DNS answer for the
    /// previous TAP of a number then usually finds no sandbox.
    fn free_index(&mut self) -> Result<u32, IsolationError> {
        for _ in 0..self.max_taps {
            let index = self.next_index;
            self.next_index = index % self.max_taps + 1;
            if !self.attachments.contains_key(&index) {
                return Ok(index);
            }
        }
        Err(IsolationError::Exhausted(self.max_taps))
    }

    pub(crate) fn has_free_index(&self) -> bool {
        u32::try_from(self.attachments.len()).is_ok_and(|used| used < self.max_taps)
    }

    pub(crate) fn ready_count(&self) -> usize {
        let is_ready = |a: &&Attachment| matches!(a.usage, Usage::Ready(_));
        self.attachments.values().filter(is_ready).count()
    }

    /// # Errors
    /// Returns [`IsolationError::Unknown`] if the number is not in use or its device is gone.
    pub(crate) fn get(&self, index: u32) -> Result<&Attachment, IsolationError> {
        self.any(index)
            .filter(|attachment| !matches!(attachment.usage, Usage::Gone))
            .ok_or(IsolationError::Unknown(TapIndex(index)))
    }

    /// Like [`Self::get`], but also finds a TAP whose device is gone.
    pub(crate) fn any(&self, index: u32) -> Option<&Attachment> {
        self.attachments.get(&index)
    }

    /// # Errors
    /// Returns [`IsolationError::Unknown`] if the number is not in use.
    pub(crate) fn get_mut(&mut self, index: u32) -> Result<&mut Attachment, IsolationError> {
        self.attachments
            .get_mut(&index)
            .ok_or(IsolationError::Unknown(TapIndex(index)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Attachment)> {
        self.attachments.iter().map(|(index, tap)| (*index, tap))
    }

    /// The counters and rate-limit state that the programs keep for a TAP.
    pub(crate) fn state(&self, index: u32) -> Result<State, IsolationError> {
        let state = self.states.get(&index, 0);
        state.map_err(|e| system("read a TAP's state", e))
    }

    /// Writes a TAP's entry to the map, then records it. The programs apply it from the next packet on.
    pub(crate) fn switch(&mut self, index: u32, entry: layout::Tap) -> Result<(), IsolationError> {
        self.write_entry(index, &entry)?;
        self.get_mut(index)?.entry = entry;
        Ok(())
    }

    /// Makes the programs drop all packets of a TAP. Returns the number of the rule set that the TAP used, which the
    /// caller must release, or `None` if the TAP is unknown.
    pub(crate) fn close(&mut self, index: u32) -> Option<u32> {
        let attachment = self.attachments.get_mut(&index)?;
        let rule_set = attachment.entry.rule_set();
        (attachment.entry.policy, attachment.entry.tenure) = (0, 0);
        let entry = attachment.entry;
        // Writing an element of an array map cannot fail.
        let _always_written = self.write_entry(index, &entry);
        Some(rule_set)
    }

    /// Marks a number as gone after its device moved to another number.
    pub(crate) fn vacate(&mut self, index: u32) {
        let Some(attachment) = self.attachments.get_mut(&index) else {
            return;
        };
        (attachment.usage, attachment.entry.ifindex) = (Usage::Gone, 0);
        let entry = attachment.entry;
        // Writing an element of an array map cannot fail.
        let _always_written = self.write_entry(index, &entry);
    }

    /// Numbers of the TAPs whose devices were removed.
    pub(crate) fn without_device(&self) -> Vec<u32> {
        self.iter()
            .filter(|(_, attachment)| !attachment.is_device_present())
            .map(|(index, _)| index)
            .collect()
    }

    /// Name and device index of a TAP that neither this server nor one of its sandboxes uses, in turn.
    pub(crate) fn next_unclaimed(&mut self) -> Option<(String, u32)> {
        let last = self.last_unclaimed;
        let later = self.attachments.range(last + 1..);
        let mut taps = later.chain(self.attachments.range(..=last));
        let (index, tap) = taps.find(|(_, tap)| tap.is_unclaimed())?;
        self.last_unclaimed = *index;
        Some((tap.name.clone(), tap.entry.ifindex))
    }

    /// Removes a TAP's entries and frees its number. Returns its device index.
    pub(crate) fn remove(&mut self, index: u32) -> Option<u32> {
        let attachment = self.attachments.remove(&index)?;
        let ifindex = attachment.entry.ifindex;
        let _absent = self.indices.remove(&ifindex);
        let _stays_closed = self.write_entry(index, &layout::Tap::default());
        Some(ifindex)
    }

    /// Whether any TAP has an open flow, or its state cannot be read.
    pub(crate) fn may_have_open_flows(&self) -> bool {
        self.iter().any(|(index, tap)| {
            let opened = self.state(index).map(|state| state.opened);
            opened.ok() != Some(tap.entry.closed)
        })
    }

    /// Counts removed flows as closed, so that they no longer count towards their TAPs' limits on open flows.
    pub(crate) fn credit_flows(&mut self, removed: &BTreeMap<u32, u64>) {
        for (index, flows) in removed {
            let Some(attachment) = self.attachments.get_mut(index) else {
                continue;
            };
            attachment.entry.closed += flows;
            let entry = attachment.entry;
            // If this fails, the next credit or policy change writes the total.
            let _written_later = self.write_entry(*index, &entry);
        }
    }

    /// Closes this server's descriptors of all TAPs. If a VM has a TAP open, keeps the ready TAPs and returns true.
    /// Otherwise removes all TAPs. A TAP that no process has open may still exist: it is persistent if a predecessor
    /// was killed just after it took the TAP from its stock.
    pub(crate) fn close_descriptors(&mut self) -> bool {
        for attachment in self.attachments.values_mut() {
            if let Usage::Leased(owned) = &mut attachment.usage {
                *owned = None;
            }
        }
        let is_ready = |attachment: &Attachment| matches!(attachment.usage, Usage::Ready(_));
        let mut others = self.attachments.values().filter(|a| !is_ready(a));
        // The name alone does not identify a device: a new one may have the name of one that is gone.
        let is_used = others.any(|tap| {
            tap.is_device_present() && !device::remove_unopened(&tap.name, tap.entry.ifindex)
        });
        for attachment in std::mem::take(&mut self.attachments).into_values() {
            if let Usage::Ready(tap) = attachment.usage
                && is_used
            {
                tap.keep();
            }
        }
        is_used
    }

    /// The number to which the programs map a device.
    pub(crate) fn index_in_kernel(&self, ifindex: u32) -> Option<u32> {
        self.indices.get(&ifindex, 0).ok()
    }

    /// A TAP's entry in the map.
    pub(crate) fn entry_in_kernel(&self, index: u32) -> Option<layout::Tap> {
        self.entries.get(&index, 0).ok()
    }

    fn read_entry(&self, index: u32) -> layout::Tap {
        self.entry_in_kernel(index).unwrap_or_default()
    }

    pub(crate) fn write_entry(
        &mut self,
        index: u32,
        entry: &layout::Tap,
    ) -> Result<(), IsolationError> {
        let written = self.entries.set(index, entry, 0);
        written.map_err(|e| system("write a TAP's entry", e))
    }

    pub(crate) fn write_index(&mut self, ifindex: u32, index: u32) -> Result<(), IsolationError> {
        let written = self.indices.insert(ifindex, index, 0);
        written.map_err(|e| system("write a TAP's index", e))
    }
}

/// An entry under which no packet passes.
fn closed_entry(ifindex: u32) -> layout::Tap {
    layout::Tap {
        ifindex,
        ..layout::Tap::default()
    }
}
