//! The user's Python interpreter, which calls functions of the user.

use std::io;
use std::process::Command;

/// The name of the interpreter.
pub(crate) const INTERPRETER: &str = "python3";

/// The user's interpreter with the text of a program.
pub fn python_command(program: &str) -> Command {
    let mut command = Command::new(INTERPRETER);
    command
        .args(["-X", "utf8", "-c", program])
        // The order of sets of texts is otherwise another one in each process.
        .env("PYTHONHASHSEED", "0")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// The reason why [`python_command`] could not be started, with a hint.
pub fn python_failure(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!(
            "there is no `{INTERPRETER}`\nhint: install Python 3, or add its directory to PATH; only keys that name \
             functions in Python need it"
        ),
        _ => format!("`{INTERPRETER}` cannot be started: {error}"),
    }
}
