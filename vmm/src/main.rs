//! `cube-vmm`: one process, one microVM.

fn main() {}
