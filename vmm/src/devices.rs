//! The virtio devices of a microVM, behind one page of registers.
//!
//! ```text
//! slot   0 root disk (read-only)   1 writable layer   2 net   3 vsock   4 entropy
//! page   slot i at offset i * 0x200; the guest reads it without an exit, a write reaches DeviceBus::write
//! ```
//! [`DeviceBus`] owns the transports, the devices, their descriptors and the bytes of the page. It runs on vCPU 0's
//! thread between two `KVM_RUN`s. It serves a notification before the vCPU that sent it continues, and a ready
//! descriptor when [`crate::watch::Watch`] reports it. It blocks only in disk I/O: for example, a read waits for the
//! host's disk if the page cache has no copy (`RWF_NOWAIT` could move such reads to a helper thread). The work per turn
//! is bounded. A queue that still has requests gets its next turn after everything else that is ready has been served.
//!
//! Invariants: no reference into guest memory exists, and no guest can cause a panic, unbounded work or unbounded
//! memory. A device whose driver breaks the rules of its queues sets `DEVICE_NEEDS_RESET` and does nothing until the
//! driver resets it.

mod slots;

mod backend;
mod bus;

mod block;
mod console;
mod net;
mod rng;
mod vsock;

mod backlog;
mod buffers;
mod device;
mod interrupts;
mod layer;
mod queue;
mod ram;
mod registers;
pub mod state;
mod sys;

#[doc(hidden)]
pub mod fuzz;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use backend::{BackendSpec, DeviceError};
pub use bus::DeviceBus;
pub use console::ConsoleLog;
pub use interrupts::Interrupts;
pub use layer::LayerDiff;
pub use ram::Ram;
pub use slots::{INTERRUPT_ACK, PAGE_BYTES, QUEUE_NOTIFY, SLOT_STRIDE, SLOTS};
pub use state::{BusState, DeviceStateError};
