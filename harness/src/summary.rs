//! The events of a run as a [`Summary`](fold::Summary), and its parts: times, costs, memory and loads.

pub mod fold;
pub mod interference;

pub mod cost;
pub mod ratio;
pub mod turns;

pub mod density;
pub mod load;
pub mod peers;
