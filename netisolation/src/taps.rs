//! TAPs as devices: made and configured, reset between two sandboxes, and kept in stock. No policies and no maps.

pub(crate) mod tap;

// The life of a device, from creation to reuse.
pub(crate) mod device;
pub(crate) mod reset;
pub(crate) mod stock;
