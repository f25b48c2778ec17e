//! `maxtext chat`: a conversation with a model in the terminal.

use std::{
    io::{self, BufRead, IsTerminal},
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mt_data::Message;
use mt_engine::{
    FinishReason, GenerationEvent, Limits, Loaded, PromptBounds, Request, SamplingOptions, Session,
};
use signal_hook::consts::SIGINT;

use crate::{
    arguments::Settings,
    commands::decode::{self, AnswerText, Chat, PreparedChat, Screen},
    failure::Failure,
};

/// The command that forgets the conversation, and the one that ends the program.
const RESET: &str = "/reset";
const EXIT: &str = "/exit";

/// Runs `maxtext chat`.
pub fn run(settings: Settings) -> Result<(), Failure> {
    let PreparedChat { decode, tokenizer, chat, stop, speculation, .. } = decode::prepare_chat(settings)?;
    let sampling = SamplingOptions::from_config(&decode.decode);
    let loaded = decode::load_speculating(&decode, tokenizer, speculation)?;
    decode::report_loading(&loaded);
    let interrupt = Interrupt::listen()?;
    let mut conversation = Conversation {
        loaded: &loaded,
        session: loaded.session()?,
        chat,
        sampling,
        limits: Limits { max_new_tokens: None, stop },
        bounds: loaded.prompt_bounds(),
        messages: Vec::new(),
        num_answers: 0,
        screen: Screen { open: true },
    };
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    if is_terminal {
        say!("Ctrl-C stops an answer, {RESET} begins a new conversation, Ctrl-D or {EXIT} ends it");
    }
    let mut input = io::stdin().lock();
    while conversation.screen.open {
        if is_terminal {
            conversation.screen.show("> ")?;
        }
        interrupt.wait();
        let mut line = String::new();
        let read = input.read_line(&mut line);
        interrupt.work();
        match read {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => return Err(Failure::user(format!("cannot read a message: {error}"))),
        }
        match line.trim() {
            "" => {}
            EXIT => break,
            RESET => conversation.messages.clear(),
            command if command.starts_with('/') => {
                say!("`{command}` is no command; there are {RESET} and {EXIT}");
            }
            text => conversation.answer(text, &interrupt)?,
        }
    }
    if is_terminal {
        conversation.screen.show("\n")?;
    }
    Ok(())
}

/// Ctrl-C: it ends the program while it waits for a message, and otherwise only the answer.
struct Interrupt {
    is_waiting: Arc<AtomicBool>,
    received: Arc<AtomicBool>,
}

impl Interrupt {
    fn listen() -> Result<Self, Failure> {
        let (is_waiting, received) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let register = || {
            signal_hook::flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, is_waiting.clone())?;
            signal_hook::flag::register(SIGINT, received.clone())
        };
        register().map_err(|error| Failure::run(format!("cannot listen to signals: {error}")))?;
        Ok(Self { is_waiting, received })
    }

    fn wait(&self) {
        self.is_waiting.store(true, Ordering::SeqCst);
    }

    fn work(&self) {
        self.is_waiting.store(false, Ordering::SeqCst);
        self.received.store(false, Ordering::SeqCst);
    }

    fn is_received(&self) -> bool {
        self.received.load(Ordering::SeqCst)
    }
}

struct Conversation<'a> {
    loaded: &'a Loaded,
    session: Session<'a>,
    chat: Chat,
    sampling: SamplingOptions,
    limits: Limits,
    bounds: PromptBounds,
    /// The messages so far, without the system prompt.
    messages: Vec<Message>,
    num_answers: u64,
    screen: Screen,
}

impl Conversation<'_> {
    /// Shows the answer to a message as it is generated, and keeps both. A message that is too long is reported and
    /// forgotten.
    fn answer(&mut self, text: &str, interrupt: &Interrupt) -> Result<(), Failure> {
        self.messages.push(Message { role: "user".into(), content: text.into() });
        let Some(prompt) = self.prompt()? else { return Ok(()) };
        let mut answer = AnswerText::after(&prompt, &self.loaded.tokenizer)?;
        let request = Request { prompt, sample: self.num_answers };
        let (mut failure, mut finish) = (None, FinishReason::Stop);
        let screen = &mut self.screen;
        let mut receive = |event: GenerationEvent| -> Result<(), Failure> {
            match event {
                GenerationEvent::Token(token) => screen.show(&answer.push(token.token)?),
                GenerationEvent::Finished { reason, .. } => {
                    finish = reason;
                    let last = answer.finish()?;
                    screen.show(&(last + "\n"))
                }
            }?;
            if screen.open { Ok(()) } else { Err(Failure::run("standard output is closed")) }
        };
        self.session.generate(&[request], &self.sampling, &self.limits, |event| {
            if failure.is_none() {
                failure = receive(event).err();
            }
            let goes_on = failure.is_none() && !interrupt.is_received();
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        if let Some(failure) = failure.filter(|_| self.screen.open) {
            return Err(failure);
        }
        if finish == FinishReason::Length {
            let length = self.bounds.max_target_length;
            say!(
                "the answer was cut at the context length of {length} tokens; {RESET} begins a new conversation"
            );
        }
        self.num_answers += 1;
        self.messages.push(Message { role: "assistant".into(), content: answer.text.trim().to_owned() });
        Ok(())
    }

    /// The tokens of the conversation. If it leaves less than a quarter of the context for the answer, the oldest
    /// messages are forgotten. `None` if the last message alone is too long; then only that one is forgotten.
    fn prompt(&mut self) -> Result<Option<Vec<u32>>, Failure> {
        let PromptBounds { max_target_length, max_prefill_length, .. } = self.bounds;
        let limit = max_prefill_length.min(max_target_length.saturating_sub(1));
        let wanted = limit.min(max_target_length - max_target_length / 4);
        let mut first = 0;
        loop {
            let tokens = self.chat.tokens(&self.messages[first..], &self.loaded.tokenizer)?;
            let is_last = self.messages.len() == first + 1;
            if tokens.len() <= wanted || (is_last && tokens.len() <= limit) {
                if first > 0 {
                    say!("the first {first} messages no longer fit into the context and are forgotten");
                    self.messages.drain(..first);
                }
                return Ok(Some(tokens));
            }
            if is_last {
                let length = tokens.len();
                say!(
                    "the message is too long: with its template it has {length} tokens, and at most {limit} fit"
                );
                self.messages.pop();
                return Ok(None);
            }
            // A question is forgotten with its answer.
            first += (self.messages.len() - first).min(3) - 1;
        }
    }
}
