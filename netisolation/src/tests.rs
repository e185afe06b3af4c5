//! Tests of the eBPF programs with real frames: each test is the VMM on one side and the wire on the other. It runs in
//! a separate network namespace, which ends with the test's thread.

mod control;
mod frame;
mod inward;
mod names;
mod offload;
mod outward;
mod ports;
mod survive;
mod sys;
mod world;
