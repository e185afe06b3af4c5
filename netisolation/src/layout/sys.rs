//! The promise that the structures are plain bytes, which the maps' types ask for.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use aya::Pod;

use super::{
    Address, Flow, FlowKey, Pin, PinKey, Refusal, Rule, RuleKey, Settings, State, Tap, Uplink,
    WireKey,
};

/// SAFETY: each needs to be `Copy`, without padding and valid for all bytes. They are `repr(C)` of integers and
/// arrays of integers; `tests::no_structure_has_padding` adds up their fields; the types do not change at run time.
macro_rules! plain {
    ($($structure:ty),*) => { $(
        // SAFETY: see the macro: integers only, no padding (tested), for as long as the type is this one.
        unsafe impl Pod for $structure {}
    )* };
}

plain!(
    Address, Flow, FlowKey, Pin, PinKey, Refusal, Rule, RuleKey, Settings, State, Tap, Uplink,
    WireKey
);
