//! TAPs as devices: made and configured, reset between two sandboxes, and kept in stock. No policies and no maps.

pub(crate) mod tap;

// From a new device to one that is ready again.
pub(crate) mod device;
pub(crate) mod reset;
pub(crate) mod stock;
