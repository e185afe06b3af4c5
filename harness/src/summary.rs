//! Folds the events of a run into a [`Summary`](fold::Summary) of times, costs, memory and load.

pub mod fold;
pub mod interference;

pub mod cost;
pub mod ratio;
pub mod turns;

pub mod density;
pub mod load;
pub mod peers;
