//! Wire types shared by the guest agent, the API server and the harness: messages, codecs and a blocking client.
//! Contains no server and no async runtime.
//!
//! [`envd`] is the protocol of the agent in a guest; [`rest`] is the protocol of the API server.

pub mod envd;
mod guest_text;
pub mod rest;

pub use guest_text::{GUEST_TEXT_MAX, guest_text, one_line};
