//! Repetition of calls through the monitor's gate (`int $4`) in a snapshot.
//!
//! On hosts of this platform, KVM has already moved RIP past an `int` if a kick arrives before the event is injected,
//! and KVM_GET_VCPU_EVENTS does not report software exceptions (it expects RIP *at* the instruction). The saved
//! registers are then those of a guest after a call that did not happen: a page fault without its address, or an
//! address space that was not switched. The registers do not show whether the call happened, so it is repeated. Every
//! routine behind the gate may run twice, except two kinds ([`OUT`] and [`WRMSR`]).

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_vcpu_events};

/// `int $4`.
const INT_4: [u8; 2] = [0xcd, 0x04];
/// `out dx, al`. Not repeated, because the VMM may already have handled it; if it was lost, the monitor's loop around
/// each such instruction checks its condition again.
const OUT: [u8; 1] = [0xee];
/// `wrmsr`. Not repeated, because it sets the timer to a TSC value from before the snapshot; the monitor arms the timer
/// again after a restore.
const WRMSR: [u8; 2] = [0x0f, 0x30];
/// Mask of the privilege level in a selector.
const RPL: u16 = 3;

/// Moves RIP back to the `int $4` before it, if the call may be repeated. `text` returns two bytes of the monitor's
/// text, and `None` for other addresses.
pub(super) fn call_again(
    regs: &mut kvm_regs,
    sregs: &kvm_sregs,
    events: &kvm_vcpu_events,
    text: impl Fn(u64) -> Option<[u8; 2]>,
) {
    // Any other exception belongs to the instruction at RIP, so the call has ended.
    let other = events.exception.injected != 0 || events.exception.pending != 0;
    let at = regs.rip.wrapping_sub(INT_4.len() as u64);
    if sregs.cs.selector & RPL != RPL || other || text(at) != Some(INT_4) {
        return;
    }
    // The guest passes the address of the routine in r10.
    let twice = |code: [u8; 2]| !code.starts_with(&OUT) && code != WRMSR;
    if text(regs.r10).is_some_and(twice) {
        regs.rip = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: u64 = 0x100;
    const READ_CR2: u64 = 0x200;
    const OUT_AT: u64 = 0x210;
    const WRMSR_AT: u64 = 0x220;

    fn text(at: u64) -> Option<[u8; 2]> {
        match at {
            CALL => Some(INT_4),
            READ_CR2 => Some([0x0f, 0x20]),
            OUT_AT => Some([0xee, 0x48]),
            WRMSR_AT => Some(WRMSR),
            0..0x1000 => Some([0x90, 0x90]),
            _ => None,
        }
    }

    /// The resulting RIP.
    fn after(rip: u64, r10: u64, selector: u16, injected: u8) -> u64 {
        let mut regs = kvm_regs {
            rip,
            r10,
            ..Default::default()
        };
        let mut sregs = kvm_sregs::default();
        sregs.cs.selector = selector;
        let mut events = kvm_vcpu_events::default();
        events.exception.injected = injected;
        call_again(&mut regs, &sregs, &events, text);
        regs.rip
    }

    #[test]
    fn an_interrupted_call_is_repeated() {
        assert_eq!(after(CALL + 2, READ_CR2, 0x33, 0), CALL);
    }

    #[test]
    fn out_and_wrmsr_are_not_repeated() {
        assert_eq!(after(CALL + 2, OUT_AT, 0x33, 0), CALL + 2);
        assert_eq!(after(CALL + 2, WRMSR_AT, 0x33, 0), CALL + 2);
    }

    #[test]
    fn rip_is_unchanged_in_all_other_cases() {
        let elsewhere = 0xffff_8000_0000_0000;
        for (rip, r10, selector, injected) in [
            (CALL, READ_CR2, 0x33, 0),
            (CALL + 4, READ_CR2, 0x33, 0),
            (elsewhere, READ_CR2, 0x33, 0),
            (0, READ_CR2, 0x33, 0),
            (CALL + 2, elsewhere, 0x33, 0),
            // Inside a routine, at CPL 0.
            (CALL + 2, READ_CR2, 0x10, 0),
            // A fault of the instruction after the call.
            (CALL + 2, READ_CR2, 0x33, 1),
        ] {
            assert_eq!(after(rip, r10, selector, injected), rip);
        }
    }
}
