# One line for each word: the word, a tab, how often.  Lower case, letters only.
{
    line = tolower($0)
    gsub(/[^a-z]+/, " ", line)
    n = split(line, words, " ")
    for (i = 1; i <= n; i++) count[words[i]]++
}
END { for (word in count) printf "%s\t%d\n", word, count[word] | "LC_ALL=C sort" }
