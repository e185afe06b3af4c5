//! Statistics over samples, without I/O: quantiles and their intervals, slopes, tests between two builds, seeded random
//! numbers, and the axes and curves of plots.

pub mod rank;

pub mod bootstrap;
pub mod quantile;

pub mod fisher;
pub mod paired;
pub mod permutation;
pub mod slope;

pub mod chart;
pub mod random;
