//! From text to values.

use super::{
    expression::{Expression, Fraction, Function},
    value::{Sign, Value},
};

/// The deepest nesting that is read.
const DEEPEST: usize = 50;

/// The names of functions.
const FUNCTIONS: &[(&str, Function)] = &[
    ("arcsin", Function::ArcSine),
    ("arccos", Function::ArcCosine),
    ("arctan", Function::ArcTangent),
    ("sin", Function::Sine),
    ("cos", Function::Cosine),
    ("tan", Function::Tangent),
    ("log", Function::Logarithm),
    ("ln", Function::NaturalLogarithm),
    ("exp", Function::Exponential),
    ("sqrt", Function::SquareRoot),
    ("abs", Function::Absolute),
];

/// The value that a text means; `None` if it is no mathematics.
pub fn parse(text: &str) -> Option<Value> {
    let letters: Vec<char> = text.chars().collect();
    let mut parser = Parser { letters: &letters, place: 0, depth: 0 };
    let value = parser.values();
    parser.space();
    match value {
        Some(value) if parser.place == letters.len() => Some(value),
        _ => words(text),
    }
}

/// A text of letters alone, such as the name of a choice or a day.
fn words(text: &str) -> Option<Value> {
    let is_word = |letter: char| letter.is_alphabetic() || letter.is_whitespace();
    let normal = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.chars().all(is_word).then_some(Value::Words(normal))
}

struct Parser<'a> {
    letters: &'a [char],
    place: usize,
    depth: usize,
}

impl Parser<'_> {
    /// Values with commas between them, which have no order; or one value.
    fn values(&mut self) -> Option<Value> {
        let mut values = vec![self.union()?];
        while self.takes(",") || self.takes(";") {
            values.push(self.union()?);
        }
        Some(if values.len() == 1 { values.remove(0) } else { Value::Set(values) })
    }

    fn union(&mut self) -> Option<Value> {
        let mut values = vec![self.relation()?];
        while self.takes_command("cup") || self.takes_command("bigcup") {
            values.push(self.relation()?);
        }
        Some(if values.len() == 1 { values.remove(0) } else { Value::Union(values) })
    }

    fn relation(&mut self) -> Option<Value> {
        let left = self.item()?;
        let signs = [
            ("!=", Sign::Unequal, false),
            ("<=", Sign::AtMost, false),
            (">=", Sign::AtMost, true),
            ("<", Sign::Less, false),
            (">", Sign::Less, true),
            ("=", Sign::Equal, false),
        ];
        for (text, sign, is_turned) in signs {
            if self.takes(text) {
                let right = Box::new(self.relation()?);
                let left = Box::new(left);
                return Some(match is_turned {
                    true => Value::Relation { left: right, sign, right: left },
                    false => Value::Relation { left, sign, right },
                });
            }
        }
        Some(left)
    }

    /// A set, brackets with several values, or an expression.
    fn item(&mut self) -> Option<Value> {
        let start = self.place;
        if self.takes(r"\{") {
            let inner = self.nested(Self::values)?;
            return self.takes(r"\}").then(|| match inner {
                Value::Set(values) => Value::Set(values),
                single => Value::Set(vec![single]),
            });
        }
        for open in ['(', '['] {
            if !self.takes(&open.to_string()) {
                continue;
            }
            if let Some(Value::Set(values)) = self.nested(Self::values) {
                for close in [')', ']'] {
                    if self.takes(&close.to_string()) {
                        return Some(Value::Bracketed { open, values, close });
                    }
                }
            }
            self.place = start;
        }
        self.sum().map(Value::Expression)
    }

    fn sum(&mut self) -> Option<Expression> {
        let mut terms = vec![self.signed_product()?];
        loop {
            // A minus belongs to the term that it negates.
            if !self.takes("+") && self.peek() != Some('-') {
                return Some(one_or(terms, Expression::Sum));
            }
            terms.push(self.signed_product()?);
        }
    }

    fn signed_product(&mut self) -> Option<Expression> {
        if self.takes("-") {
            return Some(Expression::Negative(Box::new(self.nested(Self::signed_product)?)));
        }
        if self.takes("+") {
            return self.nested(Self::signed_product);
        }
        self.product()
    }

    fn product(&mut self) -> Option<Expression> {
        let mut value = self.power()?;
        loop {
            if self.takes("*") {
                let factor = self.signed_power()?;
                value = Expression::Product(vec![value, factor]);
            } else if self.takes("/") {
                let divisor = self.signed_power()?;
                value = Expression::Quotient(Box::new(value), Box::new(divisor));
            } else if self.begins_factor() {
                let factor = self.power()?;
                value = mixed(value, factor);
            } else {
                return Some(value);
            }
        }
    }

    fn signed_power(&mut self) -> Option<Expression> {
        if self.takes("-") {
            return Some(Expression::Negative(Box::new(self.nested(Self::signed_power)?)));
        }
        self.power()
    }

    /// Whether a factor follows without a sign, as in `2x`.
    fn begins_factor(&mut self) -> bool {
        let Some(next) = self.peek() else { return false };
        let is_cup = ["cup", "bigcup", "in"].iter().any(|command| self.sees_command(command));
        next.is_alphabetic()
            || next.is_ascii_digit()
            || next == '('
            || next == '{'
            || (next == '\\' && !is_cup && !self.sees(r"\}"))
    }

    fn power(&mut self) -> Option<Expression> {
        let mut base = self.atom()?;
        loop {
            if self.takes("!") && !self.sees("=") {
                base = Expression::Function(Function::Factorial, Box::new(base));
            } else if self.takes("%") {
                base = Expression::Percent(Box::new(base));
            } else if self.takes("**") || self.takes("^") {
                let exponent = self.nested(Self::argument)?;
                base = Expression::Power(Box::new(base), Box::new(exponent));
            } else {
                return Some(base);
            }
        }
    }

    fn atom(&mut self) -> Option<Expression> {
        match self.peek()? {
            letter if letter.is_ascii_digit() || letter == '.' => self.number(),
            '(' => self.grouped("(", ")"),
            '[' => self.grouped("[", "]"),
            '{' => self.grouped("{", "}"),
            '|' => {
                let inner = self.grouped("|", "|")?;
                Some(Expression::Function(Function::Absolute, Box::new(inner)))
            }
            '\\' => self.command(),
            letter if letter.is_alphabetic() => self.name(),
            _ => None,
        }
    }

    fn grouped(&mut self, open: &str, close: &str) -> Option<Expression> {
        if !self.takes(open) {
            return None;
        }
        let inner = self.nested(Self::sum)?;
        self.takes(close).then_some(inner)
    }

    /// The argument of a command: braces, a signed number, or one letter or digit.
    fn argument(&mut self) -> Option<Expression> {
        match self.peek()? {
            '{' => self.grouped("{", "}"),
            '(' => self.grouped("(", ")"),
            '-' => {
                self.takes("-");
                Some(Expression::Negative(Box::new(self.nested(Self::argument)?)))
            }
            '\\' => self.command(),
            letter if letter.is_ascii_digit() => self.number(),
            letter if letter.is_alphabetic() => {
                self.place += 1;
                Some(constant(&letter.to_string()))
            }
            _ => None,
        }
    }

    /// As [`Self::argument`], of a command such as `\frac`, of which a single digit is one: `\frac12`.
    fn tight_argument(&mut self) -> Option<Expression> {
        match self.peek()? {
            digit if digit.is_ascii_digit() => {
                self.place += 1;
                let value = i128::from(digit.to_digit(10)?);
                Some(Expression::Number(Fraction::new(value, 1)?))
            }
            _ => self.argument(),
        }
    }

    fn command(&mut self) -> Option<Expression> {
        self.space();
        let start = self.place + 1;
        let mut end = start;
        while self.letters.get(end).is_some_and(|letter| letter.is_ascii_alphabetic()) {
            end += 1;
        }
        let name: String = self.letters[start..end].iter().collect();
        self.place = end;
        match name.as_str() {
            "frac" => {
                let above = self.nested(Self::tight_argument)?;
                let below = self.nested(Self::tight_argument)?;
                Some(Expression::Quotient(Box::new(above), Box::new(below)))
            }
            "sqrt" => self.root(),
            "pi" => Some(Expression::Pi),
            "infty" => Some(Expression::Infinity),
            _ => match FUNCTIONS.iter().find(|(known, _)| *known == name) {
                Some((_, function)) => self.applied(*function),
                None if name.is_empty() => None,
                None => Some(Expression::Variable(name)),
            },
        }
    }

    fn root(&mut self) -> Option<Expression> {
        let order = if self.takes("[") {
            let order = self.nested(Self::sum)?;
            if !self.takes("]") {
                return None;
            }
            Some(order)
        } else {
            None
        };
        let inner = self.nested(Self::tight_argument)?;
        Some(match order {
            None => Expression::Function(Function::SquareRoot, Box::new(inner)),
            Some(order) => {
                let one = Expression::Number(Fraction::new(1, 1)?);
                let exponent = Expression::Quotient(Box::new(one), Box::new(order));
                Expression::Power(Box::new(inner), Box::new(exponent))
            }
        })
    }

    /// A function with its argument, whose power may come first: `\sin^2 x`. Logarithms may have a base: `\log_2 8`.
    fn applied(&mut self, function: Function) -> Option<Expression> {
        let base = if function == Function::Logarithm && self.takes("_") {
            Some(self.nested(Self::tight_argument)?)
        } else {
            None
        };
        let exponent = if self.takes("^") { Some(self.nested(Self::argument)?) } else { None };
        let inner = match self.peek()? {
            '(' | '{' => self.nested(Self::argument)?,
            _ => self.nested(Self::power)?,
        };
        let applied = match base {
            Some(base) => {
                let of =
                    |inner: Expression| Expression::Function(Function::NaturalLogarithm, Box::new(inner));
                Expression::Quotient(Box::new(of(inner)), Box::new(of(base)))
            }
            None => Expression::Function(function, Box::new(inner)),
        };
        Some(match exponent {
            Some(exponent) => Expression::Power(Box::new(applied), Box::new(exponent)),
            None => applied,
        })
    }

    /// Letters: a function, a constant, or variables of one letter each with their indices.
    fn name(&mut self) -> Option<Expression> {
        for (name, function) in FUNCTIONS {
            if self.sees_word(name) {
                self.place += name.chars().count();
                return self.applied(*function);
            }
        }
        for (name, value) in
            [("pi", Expression::Pi), ("infinity", Expression::Infinity), ("oo", Expression::Infinity)]
        {
            if self.sees_word(name) {
                self.place += name.chars().count();
                return Some(value);
            }
        }
        // Words are no products of variables.
        let rest = self.letters[self.place..].iter();
        if rest.take_while(|letter| letter.is_alphabetic()).count() > 3 {
            return None;
        }
        let mut name = self.letters[self.place].to_string();
        self.place += 1;
        if self.letters.get(self.place) == Some(&'_') {
            self.place += 1;
            let is_index = |letter: &char| letter.is_alphanumeric() || "{}".contains(*letter);
            while let Some(letter) = self.letters.get(self.place).filter(|letter| is_index(letter)) {
                name.push(*letter);
                self.place += 1;
            }
        }
        Some(constant(&name))
    }

    /// A number, with decimals and separators of thousands.
    fn number(&mut self) -> Option<Expression> {
        self.space();
        let (mut digits, mut decimals, mut is_decimal) = (String::new(), 0, false);
        let (mut group, mut commas) = (0, 0);
        let separates = |group: usize, commas: usize| group == 3 || commas == 0 && (1..=3).contains(&group);
        while let Some(letter) = self.letters.get(self.place).copied() {
            let digit_at = |place: usize| self.letters.get(place).is_some_and(char::is_ascii_digit);
            let is_group = (1..=3).all(|ahead| digit_at(self.place + ahead)) && !digit_at(self.place + 4);
            if letter.is_ascii_digit() {
                digits.push(letter);
                decimals += usize::from(is_decimal);
                group += 1;
            } else if letter == '.' && !is_decimal {
                is_decimal = true;
            } else if letter == ',' && !is_decimal && separates(group, commas) && is_group {
                // A comma before exactly three digits separates thousands.
                (group, commas) = (0, commas + 1);
            } else {
                break;
            }
            self.place += 1;
        }
        if digits.is_empty() {
            return None;
        }
        let exact = || {
            let denominator = 10_i128.checked_pow(u32::try_from(decimals).ok()?)?;
            Fraction::new(digits.parse().ok()?, denominator)
        };
        Some(match exact() {
            Some(fraction) => Expression::Number(fraction),
            None => {
                let (whole, rest) = digits.split_at(digits.len() - decimals);
                Expression::Approximate(format!("{whole}.{rest}").parse().ok()?)
            }
        })
    }

    fn nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        self.depth += 1;
        let value = if self.depth > DEEPEST { None } else { read(self) };
        self.depth -= 1;
        value
    }

    fn space(&mut self) {
        while self.letters.get(self.place).is_some_and(|letter| letter.is_whitespace()) {
            self.place += 1;
        }
    }

    fn peek(&mut self) -> Option<char> {
        self.space();
        self.letters.get(self.place).copied()
    }

    fn sees(&mut self, text: &str) -> bool {
        self.space();
        text.chars().enumerate().all(|(index, letter)| self.letters.get(self.place + index) == Some(&letter))
    }

    fn takes(&mut self, text: &str) -> bool {
        let sees = self.sees(text);
        if sees {
            self.place += text.chars().count();
        }
        sees
    }

    /// Whether a text follows that no letter continues.
    fn sees_word(&mut self, word: &str) -> bool {
        let end = self.place + word.chars().count();
        self.sees(word) && !self.letters.get(end).is_some_and(|letter| letter.is_alphabetic())
    }

    fn sees_command(&mut self, name: &str) -> bool {
        let end = self.place + 1 + name.len();
        self.sees(&format!("\\{name}")) && !self.letters.get(end).is_some_and(|letter| letter.is_alphabetic())
    }

    fn takes_command(&mut self, name: &str) -> bool {
        self.space();
        let sees = self.sees_command(name);
        if sees {
            self.place += 1 + name.len();
        }
        sees
    }
}

fn one_or(mut all: Vec<Expression>, several: impl FnOnce(Vec<Expression>) -> Expression) -> Expression {
    if all.len() == 1 { all.remove(0) } else { several(all) }
}

/// A variable, or the constant of that name.
fn constant(name: &str) -> Expression {
    if name == "e" { Expression::E } else { Expression::Variable(name.to_owned()) }
}

/// A product without a sign. A whole number before a fraction of two numbers is a mixed number, as in `2\frac{1}{3}`.
fn mixed(whole: Expression, factor: Expression) -> Expression {
    let is_number = |expression: &Expression| matches!(expression, Expression::Number(_));
    match &factor {
        Expression::Quotient(above, below) if is_number(&whole) && is_number(above) && is_number(below) => {
            Expression::Sum(vec![whole, factor])
        }
        _ => Expression::Product(vec![whole, factor]),
    }
}
