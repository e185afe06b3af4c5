//! Declares the structures to be plain bytes, which the types of the maps require.
#![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

use aya::Pod;

use super::{
    Address, Flow, FlowKey, Pin, PinKey, Refusal, Rule, RuleKey, Settings, State, Tap, Uplink,
    WireKey,
};

/// SAFETY: `Pod` needs `Copy` types without padding for which all bytes are valid. These are `repr(C)` structures of
/// integers and arrays of integers; `tests::structures_have_no_padding` adds up their fields.
macro_rules! plain {
    ($($structure:ty),*) => { $(
        // SAFETY: integers only and no padding, as the comment of the macro explains; a property of the type.
        unsafe impl Pod for $structure {}
    )* };
}

plain!(
    Address, Flow, FlowKey, Pin, PinKey, Refusal, Rule, RuleKey, Settings, State, Tap, Uplink,
    WireKey
);
