//! The programs, on frames: the tests are the VMM on one side and the wire on the other. Each runs in a network
//! namespace of its own, which goes with its thread.

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
