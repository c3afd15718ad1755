// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"
)

// columns is the width of the output.
const columns = 80

func title(text string) { fmt.Printf("\n%s\n", text) }

// logf prints what the harness does: its ctr commands as one would type them.
func logf(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	if strings.HasPrefix(line, "ctr ") {
		fmt.Print(command(line))
		return
	}
	fmt.Println(line)
}

// command words a command line as it is typed, broken where it is too long,
// and not between an option and its value.
func command(line string) string {
	const prompt, end = "$ ", " \\\n      "
	var b strings.Builder
	b.WriteString(prompt)
	room := columns - len(prompt) - len(` \`)
	for i, part := range parts(strings.Fields(line)) {
		switch {
		case i == 0:
		case 1+len(part) <= room:
			b.WriteByte(' ')
			room--
		default:
			b.WriteString(end)
			room = columns - len("      ") - len(` \`)
		}
		b.WriteString(part)
		room -= len(part)
	}
	b.WriteByte('\n')
	return b.String()
}

// parts joins options with the word behind them, which may be their value.
func parts(words []string) []string {
	var parts []string
	for _, word := range words {
		last := len(parts) - 1
		if last >= 0 && strings.HasPrefix(parts[last], "-") && !strings.HasPrefix(word, "-") && !strings.Contains(parts[last], " ") {
			parts[last] += " " + word
			continue
		}
		parts = append(parts, word)
	}
	return parts
}

// size returns bytes in the unit that suits; nothing for none.
func size(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return units.BytesSize(float64(bytes))
}

// duration gives a time in milliseconds, or seconds from ten on.
func duration(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}
