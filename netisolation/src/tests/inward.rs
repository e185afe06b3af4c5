//! Towards the guest.
