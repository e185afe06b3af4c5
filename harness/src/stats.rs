//! Numbers from samples: one percentile function, intervals from order statistics, slopes, permutation
//! tests. Pure functions; no clock, no files.

pub mod fisher;
pub mod fold;
pub mod paired;
pub mod permutation;
pub mod quantile;
pub mod ratio;
pub mod slope;
pub mod turns;
