//! The owner of all TAPs: hands them out from the stock, takes them back and removes them. The lock of
//! [`crate::isolation::shared::Shared`] protects it.

use std::os::fd::AsFd;

use crate::{
    datapath::{clock::monotonic_ns, flows::Swept},
    enforcement::{Enforcement, tap_table::Usage},
    error::{IsolationError, system},
    taps::{
        device,
        reset::OwnedTap,
        stock::{Disposal, TapStock},
        tap::{Tap, TapIndex},
    },
};

pub(crate) struct Owner {
    pub(crate) enforcement: Enforcement,
    pub(crate) stock: TapStock,
}

impl Owner {
    pub(crate) fn new(enforcement: Enforcement, stock: TapStock) -> Self {
        Self { enforcement, stock }
    }

    /// Takes a TAP from the stock and verifies it. `None`: the stock is empty. After an error, the TAP is removed.
    pub(crate) fn take(&mut self) -> Result<Option<Tap>, IsolationError> {
        let Some(index) = self.next_ready() else {
            return Ok(None);
        };
        let taken = self.lease(index);
        if taken.is_err() {
            self.release(index, Disposal::Remove);
        }
        taken.map(Some)
    }

    /// The next TAP of the stock whose device was not removed.
    fn next_ready(&mut self) -> Option<u32> {
        loop {
            let index = self.stock.next()?;
            let attachment = self.enforcement.taps.any(index);
            if attachment.is_some_and(|a| matches!(a.usage, Usage::Ready(_))) {
                return Some(index);
            }
        }
    }

    fn lease(&mut self, index: u32) -> Result<Tap, IsolationError> {
        let usage = &mut self.enforcement.taps.get_mut(index)?.usage;
        let Usage::Ready(owned) = std::mem::replace(usage, Usage::Leased(None)) else {
            return Err(IsolationError::Unknown(TapIndex(index)));
        };
        let copies = owned
            .descriptor()
            .and_then(|fd| Ok((fd, owned.descriptor()?)));
        *usage = Usage::Leased(Some(owned));
        let (fd, taken) = copies.map_err(|e| system("duplicate a TAP's descriptor", e))?;
        self.stock.taken(taken);
        self.enforcement.verify(index)?;
        let index = TapIndex(index);
        Ok(Tap { index, fd })
    }

    /// Whether the thread that makes TAPs has work.
    pub(crate) fn has_stock_work(&self) -> bool {
        let (ready, has_free_index) = (
            self.enforcement.taps.ready_count(),
            self.enforcement.taps.has_free_index(),
        );
        self.stock.has_work(ready, has_free_index)
    }

    /// Whether a TAP must be made.
    pub(crate) fn is_short_of_taps(&self) -> bool {
        let (ready, has_free_index) = (
            self.enforcement.taps.ready_count(),
            self.enforcement.taps.has_free_index(),
        );
        self.stock.is_short(ready, has_free_index)
    }

    /// Adds a new TAP to the stock. Its program must be attached.
    pub(crate) fn add_to_stock(&mut self, index: u32, tap: OwnedTap) -> Result<(), IsolationError> {
        self.enforcement.taps.get_mut(index)?.usage = Usage::Ready(tap);
        self.stock.add_new(index);
        Ok(())
    }

    /// Gives a reset TAP a new number, verifies it, and adds it to the stock. The flows and map entries of the TAP's
    /// last sandbox keep the old number, and the next sweep removes them.
    ///
    /// # Errors
    /// Returns the TAP, whose device must then be removed.
    pub(crate) fn restock(&mut self, from: u32, tap: OwnedTap) -> Result<(), OwnedTap> {
        let Ok(to) = self.enforcement.register(&tap.device) else {
            return Err(tap);
        };
        let ifindex = tap.device.index;
        let renamed = self.enforcement.datapath.rename_tap_link(from, to, ifindex);
        if renamed.is_err() || self.enforcement.verify(to).is_err() {
            return Err(tap);
        }
        self.enforcement.taps.vacate(from);
        if let Ok(attachment) = self.enforcement.taps.get_mut(to) {
            attachment.usage = Usage::Ready(tap);
            self.stock.add_reset(to);
        }
        Ok(())
    }

    /// Closes a TAP that its sandbox no longer uses. The program's link stays until the device is removed: without
    /// the program, frames from the TAP would reach the host's network stack.
    pub(crate) fn release(&mut self, index: u32, disposal: Disposal) {
        self.enforcement.flush_refusals(index);
        self.enforcement.close(index);
        let Ok(attachment) = self.enforcement.taps.get_mut(index) else {
            return;
        };
        attachment.sandbox = None;
        match std::mem::replace(&mut attachment.usage, Usage::Leased(None)) {
            Usage::Ready(tap) | Usage::Leased(Some(tap)) => {
                self.stock.release(index, tap, disposal);
            }
            Usage::Leased(None) => {}
            Usage::Gone => attachment.usage = Usage::Gone,
        }
    }

    /// First half of a sweep: closes TAPs whose devices are gone, and returns their numbers.
    pub(crate) fn close_gone(&mut self) -> Vec<u32> {
        let gone = self.enforcement.taps.without_device();
        for index in &gone {
            self.enforcement.close(*index);
            if let Ok(attachment) = self.enforcement.taps.get_mut(*index) {
                attachment.usage = Usage::Gone;
            }
        }
        gone
    }

    /// Second half of a sweep, after the flows of `gone` were removed: frees the numbers.
    pub(crate) fn finish_sweep(&mut self, gone: &[u32], swept: &Swept) {
        self.enforcement.taps.credit_flows(&swept.removed);
        let now = monotonic_ns();
        self.enforcement.pins.remove_expired(now, &swept.open);
        for index in gone {
            self.enforcement.remove(*index);
        }
    }

    /// Closes the descriptors of all TAPs. If a VM still uses a TAP, keeps the stock, the pinned links and the maps for
    /// the next server; otherwise removes them. Returns whether they were kept.
    pub(crate) fn shut_down(&mut self) -> bool {
        for tap in self.stock.take_released().taken {
            let _changed = device::set_persistent(tap.as_fd(), false);
        }
        let is_used = self.enforcement.taps.close_descriptors();
        if !is_used {
            self.enforcement.datapath.remove_pins();
        }
        is_used
    }
}
