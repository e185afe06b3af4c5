//! Guests of converted images: boot with our kernel and agent, then commands, files and users through the agent.
//!
//! The tests need /dev/kvm, root, the artifacts of `cargo xtask prepare` (CUBE_ARTIFACTS, CUBE_BIN) and Debian's package
//! `umoci`. A test without its requirements is counted as ignored, and the reason is printed.

#![expect(
    clippy::unwrap_used,
    reason = "a test ends at the first unexpected error"
)]

mod guest;
mod kinds;
mod layout;

use test_cases::cases;

fn main() {
    let cases = cases! {
        kinds::{
            kvm_an_image_of_debian_serves_the_agent,
            kvm_an_image_of_busybox_serves_the_agent,
            kvm_an_image_without_a_shell_serves_the_agent,
            kvm_an_empty_image_serves_the_agent,
        },
    };
    test_cases::run(cases, guest::lack).exit();
}
