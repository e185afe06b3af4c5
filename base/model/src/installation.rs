//! Paths of an installed server.

/// The configuration file.
pub const CONFIG_FILE: &str = "/etc/cube/cube.toml";

/// The default state directory.
pub const STATE_DIR: &str = "/var/lib/cube";
