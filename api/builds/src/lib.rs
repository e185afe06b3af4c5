//! Template builds: turn an image or a template and a list of steps into a template with memory.

// A request, and the task that owns all builds.
pub mod grant;
pub mod request;
pub mod uploads;

pub mod owner;

pub mod catalog;
pub mod record;
pub mod store;

// A build.
pub mod run;

pub mod cancel;
pub mod plan;

pub mod bases;
pub mod machine;

mod command;
mod guest;
mod output;
mod steps;

mod key;
mod layers;
mod random;
mod settings;

// Its log.
pub mod log;
pub mod page;
pub mod text;
