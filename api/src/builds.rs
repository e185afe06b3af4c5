//! Builds of templates: from an image or a template and a list of steps to a template with memory.

pub mod bases;
pub mod cancel;
pub mod catalog;
mod command;
pub mod grant;
mod guest;
mod key;
mod layers;
pub mod log;
pub(crate) mod machine;
mod output;
pub mod owner;
pub mod page;
pub mod plan;
pub mod record;
pub mod request;
pub mod run;
mod settings;
mod steps;
pub mod store;
pub mod text;
pub mod uploads;
