//! Calls of the monitor through its gate (`int $4`) in a snapshot.
//!
//! On hosts of this kind, KVM has already moved RIP past an `int` when it is kicked before the event arrives, and
//! KVM_GET_VCPU_EVENTS leaves software exceptions out (it expects RIP *at* the instruction). Registers that are saved
//! then are those of a guest behind a call that never happened: a page fault without its address, or an
//! address space that was not switched. Whether the call happened cannot be told from the registers, so it is made
//! again; all routines behind the gate but two may run twice.

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_vcpu_events};

/// `int $4`.
const INT_4: [u8; 2] = [0xcd, 0x04];
/// `out dx, al`: the VMM may have acted on it. The monitor calls all of these in loops that look again.
const OUT: [u8; 1] = [0xee];
/// `wrmsr`: of the timer, in ticks of a time that is over. The monitor arms it anew after a restore.
const WRMSR: [u8; 2] = [0x0f, 0x30];
/// CPL in a selector.
const RPL: u16 = 3;

/// Puts RIP back to the `int $4` that it stands behind, if the call can be made again. `text` gives two bytes of the
/// monitor's text, and none for addresses elsewhere.
pub(super) fn call_again(
    regs: &mut kvm_regs,
    sregs: &kvm_sregs,
    events: &kvm_vcpu_events,
    text: impl Fn(u64) -> Option<[u8; 2]>,
) {
    // An exception of another kind is that of the instruction at RIP, so the call is over.
    let other = events.exception.injected != 0 || events.exception.pending != 0;
    let at = regs.rip.wrapping_sub(INT_4.len() as u64);
    if sregs.cs.selector & RPL != RPL || other || text(at) != Some(INT_4) {
        return;
    }
    // The guest names the routine in r10.
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

    /// RIP afterwards.
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
    fn a_call_is_made_again() {
        assert_eq!(after(CALL + 2, READ_CR2, 0x33, 0), CALL);
    }

    #[test]
    fn what_may_not_run_twice_does_not() {
        assert_eq!(after(CALL + 2, OUT_AT, 0x33, 0), CALL + 2);
        assert_eq!(after(CALL + 2, WRMSR_AT, 0x33, 0), CALL + 2);
    }

    #[test]
    fn all_else_stays_where_it_is() {
        let elsewhere = 0xffff_8000_0000_0000;
        for (rip, r10, selector, injected) in [
            (CALL, READ_CR2, 0x33, 0),
            (CALL + 4, READ_CR2, 0x33, 0),
            (elsewhere, READ_CR2, 0x33, 0),
            (0, READ_CR2, 0x33, 0),
            (CALL + 2, elsewhere, 0x33, 0),
            // In a routine, at CPL 0.
            (CALL + 2, READ_CR2, 0x10, 0),
            // A fault of the instruction behind the call.
            (CALL + 2, READ_CR2, 0x33, 1),
        ] {
            assert_eq!(after(rip, r10, selector, injected), rip);
        }
    }
}
