//! Statistics over samples: quantiles, confidence intervals, slopes and tests. Pure functions without I/O.

pub mod bootstrap;
pub mod cost;
pub mod density;
pub mod fisher;
pub mod fold;
pub mod interference;
pub mod load;
pub mod paired;
pub mod peers;
pub mod permutation;
pub mod quantile;
pub mod ratio;
pub mod slope;
pub mod turns;
