//! Tests of the eBPF programs with real frames. Each test acts as the VMM on one side and as the wire on the other, and
//! runs in a separate network namespace, which ends with the test's thread.

mod connections;
mod control;
mod frame;
mod handed;
mod inward;
mod local;
mod names;
mod offload;
mod outward;
mod ports;
mod server;
mod stack;
mod survive;
mod sys;
mod world;
